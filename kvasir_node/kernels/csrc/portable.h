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

KV_TARGET static void KV(tile_int4)(int rows, const uint8_t *w, const int16_t *a, ptrdiff_t stride, int n,
                                    const float *unit, const float *sum, ptrdiff_t blocks, float *total)
{
    for (int r = 0; r < rows; r++, a += stride, unit += blocks, sum += 4 * blocks, total += PANEL) {
        const uint8_t *group = w;
        float part[PANEL] = {0};
        for (int g = 0; g < n; g += GROUP) {
            const uint16_t *scale = (const uint16_t *)group, *minimum = scale + PANEL;
            const uint32_t *q = (const uint32_t *)(group + PANEL * 4);
            int32_t s[PANEL] = {0};
            for (int k = g; k < kv_min(g + GROUP, n); k += 8, q += PANEL)
                for (int o = 0; o < PANEL; o++)
                    for (int i = 0; i < 4; i++)
                        s[o] += (int32_t)(q[o] >> 4 * i & 15) * a[k + 2 * i] +
                                (int32_t)(q[o] >> (16 + 4 * i) & 15) * a[k + 2 * i + 1];
            for (int o = 0; o < PANEL; o++) {
                part[o] = fmaf((float)s[o], kv_bits_to_float((uint32_t)scale[o] << 16), part[o]);
                part[o] = fmaf(kv_bits_to_float((uint32_t)minimum[o] << 16), sum[g / GROUP], part[o]);
            }
            group = (const uint8_t *)q;
        }
        for (int o = 0; o < PANEL; o++) total[o] = fmaf(part[o], unit[0], total[o]);
    }
}
