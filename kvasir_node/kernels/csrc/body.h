/* What surrounds the tiles, compiled once per instruction set so that the compiler vectorises it there too.
 * Every step is one IEEE operation an element (contraction is off), so the bits do not depend on that. */

/* One block of one row quantised: a = round(x * (limit / max |x|)). Returns u; the sum of `a` through `sum`. */
#define QUANTISE(NAME, TYPE, LIMIT)                                                           \
    KV_TARGET static float KV(NAME)(const float *x, int n, TYPE *a, int padded, int32_t *sum) \
    {                                                                                         \
        uint32_t top = 0;                                                                     \
        for (int k = 0; k < n; k++) {                                                         \
            uint32_t bits = kv_float_to_bits(x[k]) & 0x7fffffffu;                             \
            top = bits > top ? bits : top;                                                    \
        }                                                                                     \
        float largest = kv_bits_to_float(top);                                                \
        int usable = largest >= TINY && top < 0x7f800000u;                                    \
        float inverse = usable ? LIMIT / largest : 0.0f;                                      \
        int32_t total = 0;                                                                    \
        for (int k = 0; k < n; k++) {                                                         \
            float rounded = (x[k] * inverse + 12582912.0f) - 12582912.0f;                     \
            int32_t value = usable ? (int32_t)rounded : 0;                                    \
            a[k] = (TYPE)value;                                                               \
            total += value;                                                                   \
        }                                                                                     \
        for (int k = n; k < padded; k++) a[k] = 0;                                            \
        *sum = total;                                                                         \
        if (top >= 0x7f800000u) return NAN;                                                   \
        return usable ? largest / LIMIT : 0.0f;                                               \
    }

QUANTISE(quantise16, int16_t, 32767.0f)
QUANTISE(quantise8, int8_t, 127.0f)
#undef QUANTISE

/* `n` rows of `in` floats, `stride` apart, made ready for matrices of `kind`; `scratch` as kv_rows_bytes says. */
KV_TARGET static void KV(prepare)(int kind, int in, const float *x, ptrdiff_t stride, int n, uint8_t *scratch,
                                  kv_rows *rows)
{
    int step = kv_block(kind);
    memset(rows, 0, sizeof *rows);
    rows->blocks = (in + step - 1) / step;
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
    rows->stride = rows->blocks * step;
    rows->unit = (float *)scratch;
    rows->sum = rows->unit + kv_up(n * rows->blocks, 16);
    rows->a16 = (int16_t *)(rows->sum + kv_up(n * rows->blocks, 16));
    rows->a8 = (int8_t *)rows->a16;
    for (int r = 0; r < n; r++)
        for (int b = 0; b < rows->blocks; b++) {
            const float *from = x + r * stride + b * step;
            ptrdiff_t at = r * rows->stride + b * step, cell = r * rows->blocks + b;
            int width = kv_min(step, in - b * step);
            int32_t sum;
            if (kind == KV_INT8) {
                rows->unit[cell] = KV(quantise16)(from, width, rows->a16 + at, step, &sum);
            } else {
                rows->unit[cell] = KV(quantise8)(from, width, rows->a8 + at, step, &sum);
                rows->sum[cell] = (float)sum * rows->unit[cell];
            }
        }
}

/* y[r, o] for the outputs of panels [begin, end). n is at most ROWS; `total` holds ROWS * PANEL floats. */
KV_TARGET static void KV(linear)(const kv_matrix *m, const kv_rows *rows, int n, float *y, ptrdiff_t stride, int begin,
                                 int end, float *total)
{
    int step = kv_block(m->kind);
    const uint8_t *w = m->data + begin * kv_panel_bytes(m->kind, m->in);
    for (int p = begin; p < end; p++) {
        memset(total, 0, (size_t)n * PANEL * 4);
        for (int b = 0; b < rows->blocks; b++) {
            int width = kv_min(step, m->in - b * step);
            ptrdiff_t at = (ptrdiff_t)b * step;
            switch (m->kind) {
            case KV_F32: KV(tile_f32)(n, w, rows->x + at, rows->stride, width, total); break;
            case KV_BF16: KV(tile_bf16)(n, w, rows->x + at, rows->stride, width, total); break;
            case KV_INT8:
                KV(tile_int8)(n, w, rows->a16 + at, rows->stride, width, rows->unit + b, rows->blocks, total);
                break;
            default:
                KV(tile_int4)
                (n, w, rows->a8 + at, rows->stride, width, rows->unit + b, rows->sum + b, rows->blocks, total);
            }
            w += kv_block_bytes(m->kind, width);
        }
        int outputs = kv_min(PANEL, m->out - p * PANEL);
        for (int r = 0; r < n; r++)
            memcpy(y + r * stride + p * PANEL, total + r * PANEL, (size_t)outputs * 4);
    }
}

/* gate = gate / (1 + exp(-gate)) * up, with exp as in Cephes (expf.c): Cody-Waite reduction, degree 6, about 1 ulp. */
KV_TARGET static void KV(silu_mul)(float *gate, const float *up, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        float g = gate[i], v = -g;
        v = v > 88.0f ? 88.0f : v;
        v = v < -87.0f ? -87.0f : v;
        float shifted = v * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits */
        float whole = shifted - 12582912.0f;
        float rest = fmaf(whole, -0.693359375f, v);
        rest = fmaf(whole, 2.12194440e-4f, rest);
        float e = 1.9875691500e-4f;
        e = fmaf(e, rest, 1.3981999507e-3f);
        e = fmaf(e, rest, 8.3334519073e-3f);
        e = fmaf(e, rest, 4.1665795894e-2f);
        e = fmaf(e, rest, 1.6666665459e-1f);
        e = fmaf(e, rest, 5.0000001201e-1f);
        e = fmaf(e, rest * rest, rest) + 1.0f;
        uint32_t power = (kv_float_to_bits(shifted) << 23) + 0x3f800000u;
        e = e * kv_bits_to_float(power);
        gate[i] = g / (1.0f + e) * up[i];
    }
}
