/* The tiles in plain C: what every other instruction set must equal bit for bit. The includer defines KV(name) and
 * KV_TARGET. A tile adds one block of inputs to `total` [rows][PANEL], for `rows` rows and one panel of outputs. */

KV_TARGET static void KV(tile_f32)(int rows, const uint8_t *w, const float *x, ptrdiff_t stride, int n, float *total)
{
    for (int r = 0; r < rows; r++, x += stride, total += PANEL) {
        const float *weight = (const float *)w;
        float s[PANEL] = {0};
        for (int k = 0; k < n; k++, weight += PANEL)
            for (int o = 0; o < PANEL; o++) s[o] = fmaf(weight[o], x[k], s[o]);
        for (int o = 0; o < PANEL; o++) total[o] += s[o];
    }
}

KV_TARGET static void KV(tile_bf16)(int rows, const uint8_t *w, const float *x, ptrdiff_t stride, int n, float *total)
{
    for (int r = 0; r < rows; r++, x += stride, total += PANEL) {
        const uint32_t *pair = (const uint32_t *)w;
        float s[PANEL] = {0};
        for (int k = 0; k < n; k += 2, pair += PANEL) {
            for (int o = 0; o < PANEL; o++) s[o] = fmaf(kv_bits_to_float(pair[o] << 16), x[k], s[o]);
            for (int o = 0; o < PANEL; o++) s[o] = fmaf(kv_bits_to_float(pair[o] & 0xffff0000u), x[k + 1], s[o]);
        }
        for (int o = 0; o < PANEL; o++) total[o] += s[o];
    }
}

KV_TARGET static void KV(tile_int8)(int rows, const uint8_t *w, const int16_t *a, ptrdiff_t stride, int n,
                                    const float *unit, ptrdiff_t blocks, float *total)
{
    const float *scale = (const float *)w;
    for (int r = 0; r < rows; r++, a += stride, unit += blocks, total += PANEL) {
        const int8_t *q = (const int8_t *)(w + PANEL * 4);
        int32_t s[PANEL] = {0};
        for (int k = 0; k < n; k += 2, q += 2 * PANEL)
            for (int o = 0; o < PANEL; o++) s[o] += q[2 * o] * a[k] + q[2 * o + 1] * a[k + 1];
        for (int o = 0; o < PANEL; o++) total[o] = fmaf((float)s[o], scale[o] * unit[0], total[o]);
    }
}

KV_TARGET static void KV(tile_int4)(int rows, const uint8_t *w, const int8_t *a, ptrdiff_t stride, int n,
                                    const float *unit, const float *sum, ptrdiff_t blocks, float *total)
{
    const uint16_t *scale = (const uint16_t *)w, *minimum = scale + PANEL;
    for (int r = 0; r < rows; r++, a += stride, unit += blocks, sum += blocks, total += PANEL) {
        const uint8_t *q = w + PANEL * 4;
        int32_t s[PANEL] = {0};
        for (int k = 0; k < n; k += 8, q += 4 * PANEL)
            for (int o = 0; o < PANEL; o++)
                for (int j = 0; j < 4; j++)
                    s[o] += (q[4 * o + j] & 15) * a[k + j] + (q[4 * o + j] >> 4) * a[k + 4 + j];
        for (int o = 0; o < PANEL; o++) {
            float step = kv_bits_to_float((uint32_t)scale[o] << 16);
            float low = kv_bits_to_float((uint32_t)minimum[o] << 16);
            total[o] = fmaf((float)s[o], step * unit[0], total[o]);
            total[o] = fmaf(low, sum[0], total[o]);
        }
    }
}
