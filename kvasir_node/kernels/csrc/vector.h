/* The tiles in vectors. The includer defines, for its instruction set:
 *   KV(name), KV_TARGET, VL (fp32 lanes), V, U (32-bit lanes), and
 *   v_zero v_load v_store v_set v_fma v_add v_mul     fp32; v_fma(a, b, c) = a * b + c, rounded once
 *   v_low16(U), v_high16(U)                           the bf16 in the low or high half of each lane
 *   v_bf16(p)                                         VL bf16 from memory
 *   W8, s8_load(p)                                    pairs of int8 as pairs of int16, one pair a 32-bit lane
 *   u_load(p), u_four(U, i)                           32-bit lanes; bits 4i to 4i + 3 of their 16-bit halves as W8
 *   S8 s8_zero s8_dot(s, w, pair) s8_value            exact sums of products of int16 pairs
 *   WIDE, NARROW    vectors of a panel taken at once for one row, and for several
 *   MANY            rows of the largest tile: 8 or 4
 * A tile holds R rows by C vectors in registers; R and C are constants where it is inlined. */

/* One row: the next step, which keeps the hardware's own prefetch running (farther ahead was slower). More rows: the
 * same place in the next block, since this one is read again from the cache. */
#define AHEAD 128
#define PREFETCH(p) __builtin_prefetch((const char *)(p) + ahead)

KV_TARGET KV_INLINE void KV(f32_rc)(const int R, const int C, const uint8_t *w, const float *x, ptrdiff_t stride, int n,
                                    float *total)
{
    const ptrdiff_t ahead = R == 1 ? AHEAD : PANEL * 4 * n;
    V s[MANY][WIDE];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) s[r][c] = v_zero();
    const float *weight = (const float *)w;
    for (int k = 0; k < n; k++, weight += PANEL) {
        V wv[WIDE];
        for (int c = 0; c < C; c += 16 / VL) PREFETCH(weight + c * VL);
        for (int c = 0; c < C; c++) wv[c] = v_load(weight + c * VL);
        for (int r = 0; r < R; r++) {
            V xv = v_set(x[r * stride + k]);
            for (int c = 0; c < C; c++) s[r][c] = v_fma(wv[c], xv, s[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float *t = total + r * PANEL + c * VL;
            v_store(t, v_add(v_load(t), s[r][c]));
        }
}

KV_TARGET KV_INLINE void KV(bf16_rc)(const int R, const int C, const uint8_t *w, const float *x, ptrdiff_t stride, int n,
                                     float *total)
{
    const ptrdiff_t ahead = R == 1 ? AHEAD : PANEL * 2 * n;
    V s[MANY][WIDE];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) s[r][c] = v_zero();
    for (int k = 0; k < n; k += 2, w += PANEL * 4) {
        V even[WIDE], odd[WIDE];
        for (int c = 0; c < C; c += 16 / VL) PREFETCH(w + c * VL * 4);
        for (int c = 0; c < C; c++) {
            U pair = u_load(w + c * VL * 4);
            even[c] = v_low16(pair);
            odd[c] = v_high16(pair);
        }
        for (int r = 0; r < R; r++) {
            V x0 = v_set(x[r * stride + k]), x1 = v_set(x[r * stride + k + 1]);
            for (int c = 0; c < C; c++) s[r][c] = v_fma(even[c], x0, s[r][c]);
            for (int c = 0; c < C; c++) s[r][c] = v_fma(odd[c], x1, s[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float *t = total + r * PANEL + c * VL;
            v_store(t, v_add(v_load(t), s[r][c]));
        }
}

/* `w` is the panel's block, `c0` the first output of the tile in it. */
KV_TARGET KV_INLINE void KV(int8_rc)(const int R, const int C, const uint8_t *w, int c0, const int16_t *a,
                                     ptrdiff_t stride, int n, const float *unit, ptrdiff_t blocks, float *total)
{
    const ptrdiff_t ahead = R == 1 ? AHEAD : PANEL * n;
    S8 s[MANY][WIDE];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) s[r][c] = s8_zero();
    const uint8_t *q = w + PANEL * 4 + c0 * 2;
    for (int k = 0; k < n; k += 2, q += PANEL * 2) {
        W8 wv[WIDE];
        PREFETCH(q);
        for (int c = 0; c < C; c++) wv[c] = s8_load(q + c * VL * 2);
        for (int r = 0; r < R; r++) {
            int32_t pair = kv_load32(a + r * stride + k);
            for (int c = 0; c < C; c++) s[r][c] = s8_dot(s[r][c], wv[c], pair);
        }
    }
    for (int c = 0; c < C; c++) {
        V scale = v_load((const float *)w + c0 + c * VL);
        for (int r = 0; r < R; r++) {
            float *t = total + r * PANEL + c0 + c * VL;
            V step = v_mul(scale, v_set(unit[r * blocks]));
            v_store(t, v_fma(s8_value(s[r][c]), step, v_load(t)));
        }
    }
}

/* Four bits of each 16-bit half times the pair of inputs that they belong to. */
#define STEP4(i)                                                              \
    {                                                                         \
        W8 wv[WIDE];                                                          \
        for (int c = 0; c < C; c++) wv[c] = u_four(both[c], i);               \
        for (int r = 0; r < R; r++) {                                         \
            int32_t pair = kv_load32(a + r * stride + k + 2 * i);             \
            for (int c = 0; c < C; c++) s[r][c] = s8_dot(s[r][c], wv[c], pair); \
        }                                                                     \
    }

KV_TARGET KV_INLINE void KV(int4_rc)(const int R, const int C, const uint8_t *w, int c0, const int16_t *a,
                                     ptrdiff_t stride, int n, const float *unit, const float *sum, ptrdiff_t blocks,
                                     float *total)
{
    const ptrdiff_t ahead = R == 1 ? AHEAD : kv_block_bytes(KV_INT4, BLOCK);
    V part[MANY][WIDE];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) part[r][c] = v_zero();
    for (int g = 0; g < n; g += GROUP) {
        S8 s[MANY][WIDE];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) s[r][c] = s8_zero();
        const uint8_t *q = w + PANEL * 4 + c0 * 4;
        for (int k = g; k < kv_min(g + GROUP, n); k += 8, q += PANEL * 4) {
            U both[WIDE];
            for (int c = 0; c < C; c += 16 / VL) PREFETCH(q + c * VL * 4);
            for (int c = 0; c < C; c++) both[c] = u_load(q + c * VL * 4);
            STEP4(0)
            STEP4(1)
            STEP4(2)
            STEP4(3)
        }
        const uint16_t *scales = (const uint16_t *)w + c0;
        for (int c = 0; c < C; c++) {
            V scale = v_bf16(scales + c * VL), low = v_bf16(scales + PANEL + c * VL);
            for (int r = 0; r < R; r++) {
                part[r][c] = v_fma(s8_value(s[r][c]), scale, part[r][c]);
                part[r][c] = v_fma(low, v_set(sum[4 * r * blocks + g / GROUP]), part[r][c]);
            }
        }
        w = q - c0 * 4;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float *t = total + r * PANEL + c0 + c * VL;
            v_store(t, v_fma(part[r][c], v_set(unit[r * blocks]), v_load(t)));
        }
}

/* Rows in tiles of MANY, 4, 2 and 1; the panel's columns in steps of NARROW vectors (one row: WIDE). */
#define EACH_TILE(CALL)                                                     \
    int r = 0;                                                              \
    if (MANY > 4)                                                           \
        for (; rows - r >= MANY; r += MANY)                                 \
            for (int c = 0; c < PANEL; c += NARROW * VL) CALL(MANY, NARROW) \
    for (; rows - r >= 4; r += 4)                                           \
        for (int c = 0; c < PANEL; c += NARROW * VL) CALL(4, NARROW)        \
    if (rows - r >= 2) {                                                    \
        for (int c = 0; c < PANEL; c += NARROW * VL) CALL(2, NARROW)        \
        r += 2;                                                             \
    }                                                                       \
    if (rows - r == 1)                                                      \
        for (int c = 0; c < PANEL; c += WIDE * VL) CALL(1, WIDE)

KV_TARGET static void KV(tile_f32)(int rows, const uint8_t *w, const float *x, ptrdiff_t stride, int n, float *total)
{
#define CALL(R, C) KV(f32_rc)(R, C, w + c * 4, x + r * stride, stride, n, total + r * PANEL + c);
    EACH_TILE(CALL)
#undef CALL
}

KV_TARGET static void KV(tile_bf16)(int rows, const uint8_t *w, const float *x, ptrdiff_t stride, int n, float *total)
{
#define CALL(R, C) KV(bf16_rc)(R, C, w + c * 4, x + r * stride, stride, n, total + r * PANEL + c);
    EACH_TILE(CALL)
#undef CALL
}

KV_TARGET static void KV(tile_int8)(int rows, const uint8_t *w, const int16_t *a, ptrdiff_t stride, int n,
                                    const float *unit, ptrdiff_t blocks, float *total)
{
#define CALL(R, C) KV(int8_rc)(R, C, w, c, a + r * stride, stride, n, unit + r * blocks, blocks, total + r * PANEL);
    EACH_TILE(CALL)
#undef CALL
}

KV_TARGET static void KV(tile_int4)(int rows, const uint8_t *w, const int16_t *a, ptrdiff_t stride, int n,
                                    const float *unit, const float *sum, ptrdiff_t blocks, float *total)
{
#define CALL(R, C)                                                                                                    \
    KV(int4_rc)(R, C, w, c, a + r * stride, stride, n, unit + r * blocks, sum + 4 * r * blocks, blocks, total + r * PANEL);
    EACH_TILE(CALL)
#undef CALL
}

#undef STEP4
#undef EACH_TILE
#undef PREFETCH
#undef AHEAD
