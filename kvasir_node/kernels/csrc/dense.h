/* What a model computes beside its experts: products, norms and turns by position of its own rows, all of one kind, fp32
 * or bf16, and the weighted sum of experts' outputs. Rows are contiguous. A matrix may be bf16 beside fp32 rows: the
 * sums are those of the same values in fp32, from half the memory. */

typedef struct {
    kv_matrix matrix;  /* fp32 or bf16 */
    const float *bias; /* [out], or none */
    int32_t isa;
    int32_t kind; /* of rows and results */
} kv_dense;

typedef struct {
    const float *weight; /* [width] */
    int32_t kind;
    int32_t width;
    float epsilon;
    int32_t isa;
} kv_norm;

/* y[n, out] = x[n, in] @ matrix.T + bias. Returns whether that worked: it may need memory. */
KV_API int32_t kv_dense_run(const kv_dense *d, const void *x, int64_t n, void *y)
{
    const kv_isa *with = &kv_isas[d->isa];
    const kv_matrix *m = &d->matrix;
    ptrdiff_t in = m->in, item = kv_row_bytes(d->kind, 1);
    kv_rows rows = {0};
    rows.blocks = (in + BLOCK - 1) / BLOCK;
    rows.stride = m->kind == KV_BF16 ? kv_up(in, 2) : in;
    float *wide = NULL;
    if ((d->kind == KV_BF16 || rows.stride != in) &&
        !(wide = malloc((size_t)((n < ROWS ? n : ROWS) * rows.stride) * 4 + 4)))
        return 0;
    for (int64_t first = 0; first < n; first += ROWS) {
        int some = (int)(n - first < ROWS ? n - first : ROWS);
        const uint8_t *from = (const uint8_t *)x + first * in * item;
        rows.x = wide ? wide : (const float *)from;
        for (ptrdiff_t r = 0; wide && r < some; r++) {
            wide[(r + 1) * rows.stride - 1] = 0.0f; /* of an odd width: the weight beside it is zero too */
            if (d->kind == KV_BF16)
                with->widen((const uint16_t *)from + r * in, in, wide + r * rows.stride);
            else
                memcpy(wide + r * rows.stride, (const float *)from + r * in, (size_t)in * 4);
        }
        with->dense(m, d->bias, &rows, some, d->kind, (uint8_t *)y + first * m->out * item);
    }
    free(wide);
    return 1;
}

/* y[n, width] = the rows of x, each over its root mean square, times the weight. */
KV_API void kv_norm_run(const kv_norm *d, const void *x, int64_t n, void *y)
{
    ptrdiff_t step = kv_row_bytes(d->kind, d->width);
    for (int64_t r = 0; r < n; r++)
        kv_isas[d->isa].norm(d->kind, (const uint8_t *)x + r * step, d->weight, d->epsilon, d->width,
                             (uint8_t *)y + r * step);
}

/* y[n, width] = the sum over j of weights[n, count] * outputs[n, count, width]. */
KV_API void kv_combine(int32_t isa, int32_t kind, const void *outputs, const float *weights, int64_t n, int32_t count,
                       int64_t width, void *y)
{
    ptrdiff_t step = kv_row_bytes(kind, width);
    for (int64_t r = 0; r < n; r++)
        kv_isas[isa].combine(kind, (const uint8_t *)outputs + r * count * step, weights + r * count, count, width,
                             (uint8_t *)y + r * step);
}

/* Rotary embedding (Su et al., RoFormer): x of `heads` heads, `row_stride` and `head_stride` elements apart, to
 * y[n, heads, width]; cosine and sine [n, turned]. */
KV_API void kv_rope(int32_t isa, int32_t kind, const void *x, int64_t head_stride, int64_t row_stride, int64_t n,
                    int32_t heads, int32_t width, const void *cosine, const void *sine, int32_t turned, void *y)
{
    ptrdiff_t item = kv_row_bytes(kind, 1), at = 0;
    for (int64_t r = 0; r < n; r++)
        for (int64_t h = 0; h < heads; h++, at += width)
            kv_isas[isa].turn(kind, (const uint8_t *)x + (r * row_stride + h * head_stride) * item,
                              (const uint8_t *)cosine + r * turned * item, (const uint8_t *)sine + r * turned * item,
                              turned, width, (uint8_t *)y + at * item);
}
