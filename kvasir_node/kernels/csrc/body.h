/* What surrounds the tiles, compiled once per instruction set so that the compiler vectorises it there too.
 * Every step is one IEEE operation an element (contraction is off), so the bits do not depend on that. */

/* One block of one row quantised to int16. Returns u; float(t) of its groups through `sum`. */
KV_TARGET static float KV(quantise)(const float *x, int n, int16_t *a, float *sum)
{
    uint32_t top = 0;
    for (int k = 0; k < n; k++) {
        uint32_t bits = kv_float_to_bits(x[k]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    float largest = kv_bits_to_float(top);
    memset(a, 0, BLOCK * sizeof *a);
    memset(sum, 0, BLOCK / GROUP * sizeof *sum);
    if (top >= 0x7f800000u) return NAN;
    if (largest < TINY) return 0.0f;
    float inverse = 32767.0f / largest;
    for (int k = 0; k < n; k++) a[k] = (int16_t)((x[k] * inverse + 12582912.0f) - 12582912.0f); /* 1.5 * 2^23: rounds */
    for (int g = 0; g < BLOCK / GROUP; g++) {
        int32_t t = 0;
        for (int k = 0; k < GROUP; k++) t += a[g * GROUP + k];
        sum[g] = (float)t;
    }
    return largest / 32767.0f;
}

/* `n` rows of `in` floats, `stride` apart, made ready for matrices of `kind`; `scratch` as kv_rows_bytes says. */
KV_TARGET static void KV(prepare)(int kind, int in, const float *x, ptrdiff_t stride, int n, uint8_t *scratch,
                                  kv_rows *rows)
{
    memset(rows, 0, sizeof *rows);
    rows->blocks = (in + BLOCK - 1) / BLOCK;
    if (kind == KV_F32 || (kind == KV_BF16 && in % 2 == 0)) {
        rows->x = x;
        rows->stride = stride;
        return;
    }
    if (kind == KV_BF16) { /* an odd width: the weight beside the padding is zero, so the padding must be finite */
        float *copy = (float *)scratch;
        rows->x = copy;
        rows->stride = in + 1;
        for (int r = 0; r < n; r++) {
            memcpy(copy + r * rows->stride, x + r * stride, (size_t)in * 4);
            copy[r * rows->stride + in] = 0.0f;
        }
        return;
    }
    ptrdiff_t cells = n * rows->blocks;
    rows->stride = rows->blocks * BLOCK;
    rows->unit = (float *)scratch;
    rows->sum = rows->unit + kv_up(cells, 16);
    rows->a = (int16_t *)(rows->sum + kv_up(4 * cells, 16));
    for (int r = 0; r < n; r++)
        for (int b = 0; b < rows->blocks; b++) {
            ptrdiff_t cell = r * rows->blocks + b;
            rows->unit[cell] = KV(quantise)(x + r * stride + b * BLOCK, kv_min(BLOCK, in - b * BLOCK),
                                            rows->a + cell * BLOCK, rows->sum + 4 * cell);
        }
}

/* One panel's products with `n` rows into `total` [n][PANEL]; returns where the next panel begins. */
KV_TARGET static const uint8_t *KV(panel)(const kv_matrix *m, const kv_rows *rows, int n, const uint8_t *w, float *total)
{
    memset(total, 0, (size_t)n * PANEL * 4);
    for (int b = 0; b < rows->blocks; b++) {
        int width = kv_min(BLOCK, m->in - b * BLOCK);
        ptrdiff_t at = (ptrdiff_t)b * BLOCK;
        switch (m->kind) {
        case KV_F32: KV(tile_f32)(n, w, rows->x + at, rows->stride, width, total); break;
        case KV_BF16: KV(tile_bf16)(n, w, rows->x + at, rows->stride, width, total); break;
        case KV_INT8:
            KV(tile_int8)(n, w, rows->a + at, rows->stride, width, rows->unit + b, rows->blocks, total);
            break;
        default:
            KV(tile_int4)
            (n, w, rows->a + at, rows->stride, width, rows->unit + b, rows->sum + 4 * b, rows->blocks, total);
        }
        w += kv_block_bytes(m->kind, width);
    }
    return w;
}

/* y[r, o] for the outputs of panels [begin, end). n is at most ROWS; `total` holds ROWS * PANEL floats. */
KV_TARGET static void KV(linear)(const kv_matrix *m, const kv_rows *rows, int n, float *y, ptrdiff_t stride, int begin,
                                 int end, float *total)
{
    const uint8_t *w = m->data + begin * kv_panel_bytes(m->kind, m->in);
    for (int p = begin; p < end; p++) {
        w = KV(panel)(m, rows, n, w, total);
        int outputs = kv_min(PANEL, m->out - p * PANEL);
        for (int r = 0; r < n; r++)
            memcpy(y + r * stride + p * PANEL, total + r * PANEL, (size_t)outputs * 4);
    }
}

/* gate = gate / (1 + exp(-gate)) * up. */
KV_TARGET static void KV(silu_mul)(float *gate, const float *up, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        float g = gate[i], v = -g;
        v = v > 88.0f ? 88.0f : v;
        v = v < -87.0f ? -87.0f : v;
        gate[i] = g / (1.0f + kv_exp_within(v)) * up[i];
    }
}

/* bf16 bits as the floats they are. */
KV_TARGET static void KV(widen)(const uint16_t *from, ptrdiff_t n, float *to)
{
    for (ptrdiff_t i = 0; i < n; i++) to[i] = kv_bits_to_float((uint32_t)from[i] << 16);
}

KV_TARGET static void KV(narrow)(const float *from, ptrdiff_t n, uint16_t *to)
{
    for (ptrdiff_t i = 0; i < n; i++) to[i] = (uint16_t)kv_to_bf16(from[i]);
}

/* The sum of squares of a row of fp32 or bf16, in 32 parts; infinite or NaN where an element is. */
KV_TARGET static float KV(squares)(int kind, const void *row, ptrdiff_t n)
{
    float part[32] = {0}, sum = 0.0f;
    const float *wide = (const float *)row;
    const uint16_t *half = (const uint16_t *)row;
    ptrdiff_t k = 0;
    if (kind == KV_F32)
        for (; k + 32 <= n; k += 32)
            for (int i = 0; i < 32; i++) part[i] += wide[k + i] * wide[k + i];
    else
        for (; k + 32 <= n; k += 32)
            for (int i = 0; i < 32; i++) {
                float v = kv_bits_to_float((uint32_t)half[k + i] << 16);
                part[i] += v * v;
            }
    for (; k < n; k++) {
        float v = kind == KV_F32 ? wide[k] : kv_bits_to_float((uint32_t)half[k] << 16);
        sum += v * v;
    }
    for (int i = 0; i < 32; i++) sum += part[i];
    return sum;
}

/* Products of a model's own rows, n at most ROWS: y[n, out] = x[n, in] @ m.T + bias in fp32, rounded once to `kind`. */
KV_TARGET static void KV(dense)(const kv_matrix *m, const float *bias, const kv_rows *rows, int n, int kind, void *y)
{
    float total[ROWS * PANEL] __attribute__((aligned(64)));
    const uint8_t *w = m->data;
    for (int p = 0; p * PANEL < m->out; p++) {
        w = KV(panel)(m, rows, n, w, total);
        int outputs = kv_min(PANEL, m->out - p * PANEL);
        for (int r = 0; r < n; r++) {
            float *t = total + r * PANEL;
            ptrdiff_t at = (ptrdiff_t)r * m->out + p * PANEL;
            if (bias)
                for (int o = 0; o < outputs; o++) t[o] += bias[p * PANEL + o];
            if (kind == KV_F32)
                memcpy((float *)y + at, t, (size_t)outputs * 4);
            else
                KV(narrow)(t, outputs, (uint16_t *)y + at);
        }
    }
}

/* y = x / sqrt(mean of x^2 + epsilon) * weight for one row; bf16 rows are rounded before the weight and after it. */
KV_TARGET static void KV(norm)(int kind, const void *x, const float *weight, float epsilon, ptrdiff_t width, void *y)
{
    float scale = 1.0f / sqrtf(KV(squares)(kind, x, width) / (float)width + epsilon);
    if (kind == KV_F32) {
        const float *from = (const float *)x;
        float *to = (float *)y;
        for (ptrdiff_t i = 0; i < width; i++) to[i] = from[i] * scale * weight[i];
        return;
    }
    const uint16_t *from = (const uint16_t *)x;
    uint16_t *to = (uint16_t *)y;
    for (ptrdiff_t i = 0; i < width; i++) {
        float v = kv_bits_to_float(kv_to_bf16(kv_bits_to_float((uint32_t)from[i] << 16) * scale) << 16);
        to[i] = (uint16_t)kv_to_bf16(v * weight[i]);
    }
}

/* y[i] = the sum over j, ascending, of weight[j] * outputs[j, i], in fp32 with one rounding a term, rounded to `kind`. */
KV_TARGET static void KV(combine)(int kind, const void *outputs, const float *weight, int count, ptrdiff_t width, void *y)
{
    const float *wide = (const float *)outputs;
    const uint16_t *half = (const uint16_t *)outputs;
    float s[PANEL];
    for (ptrdiff_t at = 0; at < width; at += PANEL) {
        int n = (int)(width - at < PANEL ? width - at : PANEL);
        memset(s, 0, sizeof s);
        for (ptrdiff_t j = 0; j < count; j++) {
            ptrdiff_t from = j * width + at;
            if (kind == KV_F32 && n == PANEL)
                for (int i = 0; i < PANEL; i++) s[i] = fmaf(wide[from + i], weight[j], s[i]);
            else if (kind == KV_F32)
                for (int i = 0; i < n; i++) s[i] = fmaf(wide[from + i], weight[j], s[i]);
            else
                for (int i = 0; i < n; i++)
                    s[i] = fmaf(kv_bits_to_float((uint32_t)half[from + i] << 16), weight[j], s[i]);
        }
        if (kind == KV_F32)
            memcpy((float *)y + at, s, (size_t)n * 4);
        else
            KV(narrow)(s, n, (uint16_t *)y + at);
    }
}

/* One head of one row turned by its position: y = x * cos + (x's halves swapped, the first negated) * sin over the first
 * `turned` of `width` elements, each operation rounded to `kind`; the rest as it is. */
KV_TARGET static void KV(turn)(int kind, const void *x, const void *cosine, const void *sine, ptrdiff_t turned,
                               ptrdiff_t width, void *y)
{
    ptrdiff_t half = turned / 2, item = kind == KV_F32 ? 4 : 2;
    memcpy((uint8_t *)y + turned * item, (const uint8_t *)x + turned * item, (size_t)((width - turned) * item));
    if (kind == KV_F32) {
        const float *v = (const float *)x, *c = (const float *)cosine, *s = (const float *)sine;
        float *to = (float *)y;
        for (ptrdiff_t i = 0; i < half; i++) to[i] = v[i] * c[i] + -v[i + half] * s[i];
        for (ptrdiff_t i = half; i < turned; i++) to[i] = v[i] * c[i] + v[i - half] * s[i];
        return;
    }
    const uint16_t *v = (const uint16_t *)x, *c = (const uint16_t *)cosine, *s = (const uint16_t *)sine;
    uint16_t *to = (uint16_t *)y;
#define WIDE_OF(bits) kv_bits_to_float((uint32_t)(bits) << 16)
    for (ptrdiff_t i = 0; i < turned; i++) {
        float other = i < half ? -WIDE_OF(v[i + half]) : WIDE_OF(v[i - half]);
        float a = WIDE_OF(kv_to_bf16(WIDE_OF(v[i]) * WIDE_OF(c[i])));
        float b = WIDE_OF(kv_to_bf16(other * WIDE_OF(s[i])));
        to[i] = (uint16_t)kv_to_bf16(a + b);
    }
#undef WIDE_OF
}
