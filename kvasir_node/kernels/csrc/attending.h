/* Attention as an operator of torch: see operators.h. The step that a thread computes says whose rows they are. */

typedef struct {
    int32_t isa, count, layers; /* so many spans, and so many first layers in whose memory they have room */
    int64_t real;               /* rows; what lies behind is padding */
    const kv_span *spans;
    float *scratch;
    int64_t bytes; /* of scratch */
} kv_step;

static _Thread_local kv_step step_;

/* This thread's step, until the next call; without spans it has none. */
KV_API void kv_attend_step(int32_t isa, const kv_span *spans, int32_t count, int32_t layers, int64_t real,
                           float *scratch, int64_t bytes)
{
    step_ = (kv_step){isa, count, layers, real, spans, scratch, bytes};
}

/* Whether this thread's step can be computed here for query [1, heads, rows, dim], key and value [1, key heads, rows,
 * dim]; then how. */
static int kv_covers(kv_attention *a, const kv_tensor *given, int64_t layer, float scaling, void **data)
{
    int64_t *size[3], *stride[3];
    int kind = KV_F32, alike = 1;
    if (!step_.spans || layer < 0 || layer >= step_.layers) return 0;
    for (int i = 0; i < 3; i++) {
        int found = kv_look(given[i], 4, &size[i], &stride[i], &data[i]);
        alike = alike && found >= 0 && (i == 0 || found == kind) && size[i][2] == size[0][2] && size[i][3] % 8 == 0;
        kind = found;
    }
    if (!alike || size[1][1] != size[2][1] || size[1][1] < 1 || size[0][1] % size[1][1] || size[0][3] != size[1][3] ||
        size[0][2] < step_.real)
        return 0;
    *a = (kv_attention){kind, (int32_t)size[0][1], (int32_t)size[1][1], (int32_t)size[0][3], (int32_t)size[2][3],
                        (int32_t)size[0][2], (int32_t)step_.real, scaling, stride[0][1], stride[0][2], stride[1][1],
                        stride[1][2], stride[2][1], stride[2][2]};
    return kv_attend_scratch(a) <= step_.bytes;
}

/* (query, key, value, layer, scaling) -> [1, rows, heads, value dim]; what is not covered goes to `kvasir::attend` */
KV_API void kv_op_attention(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    kv_tensor given[3], made = NULL;
    kv_attention a;
    void *data[3], *out;
    double scaling;
    (void)inputs, (void)outputs;
    for (int i = 0; i < 3; i++) given[i] = (kv_tensor)(uintptr_t)stack[i];
    memcpy(&scaling, stack + 4, sizeof scaling);
    int covered = kv_covers(&a, given, (int64_t)stack[3], (float)scaling, data);
    if (!covered && !torch_.call("kvasir::attend", "", stack)) return;
    int64_t shape[4] = {1, 1, 1, 1}, apart[4] = {1, 1, 1, 1}; /* a call that failed gives what no model goes on with */
    if (covered) {
        shape[1] = a.rows, shape[2] = a.heads, shape[3] = a.value_dim;
        apart[2] = shape[3], apart[1] = shape[2] * apart[2], apart[0] = shape[1] * apart[1];
    }
    if (torch_.empty(4, shape, apart, torch_.dtypes[covered ? a.kind : KV_F32], torch_.cpu, 0, &made) ||
        torch_.data(made, &out))
        kv_give_up();
    if (covered) {
        kv_attend(step_.isa, &a, step_.spans, step_.count, (int32_t)stack[3], data[0], data[1], data[2], out,
                  step_.scratch);
        for (int i = 0; i < 3; i++) torch_.drop(given[i]);
    } else
        memset(out, 0xff, 4);
    stack[0] = (uint64_t)(uintptr_t)made;
}
