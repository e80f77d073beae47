/* Attention of rows over the positions before them, for one instruction set; in the order of attention.h. The includer
 * defines KV(name), KV_TARGET, KV_TILE and eight lanes of fp32:
 *   E                                           the type
 *   e_zero e_set e_load e_store e_add e_fma     as their names say; e_fma(a, b, c) = a * b + c, rounded once
 *   e_max(a, b)                                 a > b ? a : b in each lane, so that a NaN in `a` gives b
 *   e_bf16(p)                                   eight bf16 from memory
 *   e_sums(x, to)                               to[i] = the sum of the lanes of x[i], i of 0 to 7, as kv_tree adds
 * KV_TILE is KV_INLINE, so that sizes of tiles are constants and their sums stay in registers. */

/* Eight lanes of fp32 from the `at`-th element of a row of fp32 or bf16. */
KV_TARGET KV_TILE E KV(lanes)(const int kind, const uint8_t *row, ptrdiff_t at)
{
    return kind == KV_F32 ? e_load((const float *)row + at) : e_bf16((const uint16_t *)row + at);
}

/* Scores of R queries, `dim` apart, with 8 / R positions from `at`, which is below `end`, to to[query][position]. */
KV_TARGET KV_TILE void KV(score_tile)(const int kind, const int R, const float *query, const uint8_t *keys,
                                      ptrdiff_t dim, int at, int end, float *to)
{
    E s[8];
    const uint8_t *key[8];
    const ptrdiff_t bytes = dim * kv_item_bytes(kind);
    for (int c = 0; c < 8 / R; c++) key[c] = keys + kv_min(at + c, end - 1) * bytes; /* past the end: any will do */
    for (int i = 0; i < 8; i++) s[i] = e_zero();
    for (ptrdiff_t d = 0; d < dim; d += 8) {
        E q[2];
        for (int r = 0; r < R; r++) q[r] = e_load(query + r * dim + d);
        for (int c = 0; c < 8 / R; c++) {
            E k = KV(lanes)(kind, key[c], d);
            for (int r = 0; r < R; r++) s[r * (8 / R) + c] = e_fma(q[r], k, s[r * (8 / R) + c]);
        }
    }
    float sums[8];
    e_sums(s, sums);
    for (int r = 0; r < R; r++) memcpy(to + r * SPAN + at, sums + r * (8 / R), 32 / R);
}

/* Scores of `n` queries with the first `end` positions of a block, up to seven more of no meaning behind them. What is
 * read next is asked for on the way: the values of the same positions, and keys some way ahead. */
KV_TARGET KV_TILE void KV(scores)(const int kind, const kv_attention *a, int n, const float *query, const uint8_t *keys,
                                  const uint8_t *values, int end, float *to)
{
    const ptrdiff_t dim = a->dim, bytes = dim * kv_item_bytes(kind), value_bytes = a->value_dim * kv_item_bytes(kind);
    for (int at = 0; at < end; at += 8) {
        const uint8_t *key = keys + at * bytes + AHEAD, *value = values + at * value_bytes;
        for (ptrdiff_t b = 0; b < 8 * bytes; b += 64) __builtin_prefetch(key + b);
        for (ptrdiff_t b = 0; b < kv_min(8, end - at) * value_bytes; b += 64) __builtin_prefetch(value + b);
        int i = 0;
        for (; i + 2 <= n; i += 2) {
            KV(score_tile)(kind, 2, query + i * dim, keys, dim, at, end, to + i * SPAN);
            if (at + 4 < end) KV(score_tile)(kind, 2, query + i * dim, keys, dim, at + 4, end, to + i * SPAN);
        }
        if (i < n) KV(score_tile)(kind, 1, query + i * dim, keys, dim, at, end, to + i * SPAN);
    }
}

/* `n` scores become weights, relative to the largest so far, with zeros behind them up to a multiple of eight.
 * Returns what the sums so far are to be multiplied with. */
KV_TARGET static float KV(soften)(float *score, int n, float *largest, float *sum)
{
    const int all = (int)kv_up(n, 8);
    for (int k = n; k < all; k++) score[k] = -INFINITY;
    E top = e_set(*largest), added = e_zero();
    for (int k = 0; k < all; k += 8) top = e_max(e_load(score + k), top);
    float lane[8], most, before = *largest;
    e_store(lane, top);
    most = lane[0];
    for (int i = 1; i < 8; i++) most = lane[i] > most ? lane[i] : most;
    for (int k = 0; k < all; k++) score[k] = kv_exp(score[k] - most);
    for (int k = 0; k < all; k += 8) added = e_add(added, e_load(score + k));
    e_store(lane, added);
    float factor = kv_exp(before - most);
    *sum = fmaf(*sum, factor, kv_tree(lane));
    *largest = most;
    return factor;
}

/* total = total * factor + the first `n` values, weighted, for R queries and C times eight elements. */
KV_TARGET KV_TILE void KV(mix_tile)(const int kind, const int R, const int C, const float *weight, int n,
                                    const uint8_t *values, ptrdiff_t dim, ptrdiff_t d, const float *factor,
                                    float *total)
{
    E s[8];
    const ptrdiff_t bytes = dim * kv_item_bytes(kind);
    for (int i = 0; i < R * C; i++) s[i] = e_zero();
    for (int k = 0; k < n; k++, values += bytes) {
        E v[8];
        for (int c = 0; c < C; c++) v[c] = KV(lanes)(kind, values, d + 8 * c);
        for (int r = 0; r < R; r++) {
            E w = e_set(weight[r * SPAN + k]);
            for (int c = 0; c < C; c++) s[r * C + c] = e_fma(w, v[c], s[r * C + c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float *t = total + r * dim + d + 8 * c;
            e_store(t, e_fma(e_load(t), e_set(factor[r]), s[r * C + c]));
        }
}

#define MIX(R, C) \
    for (; d + 8 * (C) <= dim; d += 8 * (C)) KV(mix_tile)(kind, R, C, weight, n, values, dim, d, factor, total);

/* As mix_tile, for `rows` queries of 1, 2 or 4, over all elements. */
KV_TARGET KV_TILE void KV(mix)(const int kind, int rows, const float *weight, int n, const uint8_t *values,
                               ptrdiff_t dim, const float *factor, float *total)
{
    ptrdiff_t d = 0;
    if (rows == 4) {
        MIX(4, 2)
        MIX(4, 1)
    } else if (rows == 2) {
        MIX(2, 4)
        MIX(2, 1)
    } else {
        MIX(1, 8)
        MIX(1, 4)
        MIX(1, 1)
    }
}
#undef MIX

/* The queries of some rows of one key head go over all positions, block after block. */
KV_TARGET KV_TILE void KV(positions)(const int kind, const kv_attention *a, const kv_few *few, const uint8_t *keys,
                                     const uint8_t *values)
{
    const int end = few->start + few->rows, group = few->group, n = few->rows * group;
    for (int at = 0; at < end; at += SPAN) {
        const int some = kv_min(SPAN, end - at);
        const int first = at > few->start ? (at - few->start) * group : 0; /* of those that see this block */
        const uint8_t *key = keys + (ptrdiff_t)at * a->dim * kv_item_bytes(kind);
        const uint8_t *value = values + (ptrdiff_t)at * a->value_dim * kv_item_bytes(kind);
        KV(scores)(kind, a, n - first, few->query + (ptrdiff_t)first * a->dim, key, value, some,
                   few->score + first * SPAN);
        for (int i = first; i < n; i++)
            few->factor[i] = KV(soften)(few->score + i * SPAN, kv_seen(few, i, at), few->largest + i, few->sum + i);
        for (int i = first, rows; i < n; i += rows) {
            const int seen = kv_seen(few, i, at);
            rows = 1;
            while (rows < 4 && i + 2 * rows <= n && kv_seen(few, i + 2 * rows - 1, at) == seen) rows *= 2;
            KV(mix)(kind, rows, few->score + i * SPAN, seen, value, a->value_dim, few->factor + i,
                    few->total + (ptrdiff_t)i * a->value_dim);
        }
    }
}

/* One key head of one span: new keys and values to their places, then its rows, as many at once as `few` holds. */
KV_TARGET KV_TILE void KV(head)(const int kind, const kv_attention *a, const kv_span *span, int layer, int head,
                                const uint8_t *query, const uint8_t *key, const uint8_t *value, uint8_t *out,
                                kv_few *few)
{
    const ptrdiff_t item = kv_item_bytes(kind), dim = a->dim, value_dim = a->value_dim;
    uint8_t *keys = span->planes[2 * layer] + head * span->capacity * dim * item;
    uint8_t *values = span->planes[2 * layer + 1] + head * span->capacity * value_dim * item;
    for (ptrdiff_t r = 0; r < span->rows; r++) {
        const ptrdiff_t row = span->place + r, at = span->start + r;
        memcpy(keys + at * dim * item, key + (head * a->key_head + row * a->key_row) * item, (size_t)(dim * item));
        memcpy(values + at * value_dim * item, value + (head * a->value_head + row * a->value_row) * item,
               (size_t)(value_dim * item));
    }
    const int most = few->most / few->group;
    for (int r = 0; r < span->rows; r += few->rows) {
        few->rows = kv_min(most, span->rows - r);
        few->start = (int)span->start + r;
        const int n = few->rows * few->group;
        for (int i = 0; i < n; i++) {
            const ptrdiff_t at = (head * few->group + i % few->group) * a->query_head +
                                 (span->place + r + i / few->group) * a->query_row;
            for (ptrdiff_t d = 0; d < dim; d += 8)
                for (int j = 0; j < 8; j++)
                    few->query[i * dim + d + j] = kv_item(kind, query, at + d + j) * a->scaling;
            few->largest[i] = -INFINITY;
            few->sum[i] = 0.0f;
        }
        memset(few->total, 0, (size_t)(n * value_dim) * 4);
        KV(positions)(kind, a, few, keys, values);
        for (int i = 0; i < n; i++) {
            const ptrdiff_t at = ((span->place + r + i / few->group) * a->heads + head * few->group + i % few->group) *
                                 value_dim;
            float *total = few->total + i * value_dim;
            for (ptrdiff_t d = 0; d < value_dim; d++) total[d] = total[d] / few->sum[i];
            if (kind == KV_F32)
                memcpy(out + at * 4, total, (size_t)value_dim * 4);
            else
                for (ptrdiff_t d = 0; d < value_dim; d++) ((uint16_t *)out)[at + d] = (uint16_t)kv_to_bf16(total[d]);
        }
    }
}

KV_TARGET static void KV(attend)(const kv_attention *a, const kv_span *spans, int count, int layer,
                                 const uint8_t *query, const uint8_t *key, const uint8_t *value, uint8_t *out,
                                 kv_few *few)
{
    for (int i = 0; i < count; i++)
        for (int head = 0; head < a->key_heads; head++) {
            if (a->kind == KV_F32)
                KV(head)(KV_F32, a, spans + i, layer, head, query, key, value, out, few);
            else
                KV(head)(KV_BF16, a, spans + i, layer, head, query, key, value, out, few);
        }
}
