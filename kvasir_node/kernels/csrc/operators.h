/* Products, norms and turns as operators of torch, called by a recorded graph without the interpreter. They meet torch through
 * its stable C interface alone, whose functions the loader of this library looks up and hands over; no header of torch
 * is needed. An operator gets its arguments in 64-bit cells, owns the tensors among them, and puts its result there. */

typedef void *kv_tensor;

typedef struct {
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, kv_tensor *);
    int32_t (*data)(kv_tensor, void **);
    int32_t (*dim)(kv_tensor, int64_t *);
    int32_t (*sizes)(kv_tensor, int64_t **);
    int32_t (*strides)(kv_tensor, int64_t **);
    int32_t (*dtype)(kv_tensor, int32_t *);
    int32_t (*drop)(kv_tensor);
    int32_t (*call)(const char *, const char *, uint64_t *);
    int32_t dtypes[2]; /* of KV_F32 and KV_BF16 */
    int32_t cpu;
} kv_torch;

enum { MOST_DIMS = 8 };

static kv_torch torch_;

/* Rows of this thread's pass and how many of them are real: what lies behind is padding, and comes out as zeros. */
static _Thread_local int64_t pass_rows, pass_real;

KV_API void kv_torch_bind(const kv_torch *functions) { torch_ = *functions; }

KV_API void kv_pass(int64_t rows, int64_t real)
{
    pass_rows = rows;
    pass_real = real;
}

/* One call: the argument [..., in] of n rows at x, the result [..., out] at y, and how many rows to compute. */
typedef struct {
    kv_tensor rows, made;
    void *x, *y;
    int64_t n, live;
    ptrdiff_t bytes; /* of the result */
} kv_call;

/* Where there is no memory for a result there is nothing to give back: torch itself would end with an exception, which
 * C cannot raise. */
static void kv_give_up(void)
{
    fputs("kvasir: out of memory in a step of the model\n", stderr);
    abort();
}

/* The tensor, or a contiguous copy in its place; none where there is no memory. */
static kv_tensor kv_contiguous(kv_tensor tensor, int64_t dim, const int64_t *shape)
{
    int64_t *strides, step = 1;
    torch_.strides(tensor, &strides);
    for (int64_t d = dim - 1; d >= 0; step *= shape[d--])
        if (shape[d] != 1 && strides[d] != step) {
            uint64_t stack[2] = {(uint64_t)(uintptr_t)tensor, 0}; /* 0: the plain memory format */
            return torch_.call("aten::contiguous", "", stack) ? NULL : (kv_tensor)(uintptr_t)stack[0];
        }
    return tensor;
}

/* Takes the argument and makes the result. Whether it can be computed. */
static int kv_begin(kv_call *c, uint64_t *stack, int kind, int64_t in, int64_t out)
{
    int64_t dim = 0, *sizes = NULL, shape[MOST_DIMS], strides[MOST_DIMS], step = 1;
    int32_t dtype = 0;
    memset(c, 0, sizeof *c);
    c->rows = (kv_tensor)(uintptr_t)stack[0];
    torch_.dim(c->rows, &dim);
    torch_.sizes(c->rows, &sizes);
    torch_.dtype(c->rows, &dtype);
    int fits = dim >= 1 && dim <= MOST_DIMS && dtype == torch_.dtypes[kind] && sizes[dim - 1] == in;
    if (!fits) dim = 1;
    c->n = 1;
    for (int64_t d = 0; d < dim - 1; d++) c->n *= shape[d] = sizes[d];
    shape[dim - 1] = in;
    if (fits) fits = (c->rows = kv_contiguous(c->rows, dim, shape)) && !torch_.data(c->rows, &c->x);
    shape[dim - 1] = out;
    for (int64_t d = dim - 1; d >= 0; step *= shape[d--]) strides[d] = step;
    if (torch_.empty(dim, shape, strides, torch_.dtypes[kind], torch_.cpu, 0, &c->made) ||
        torch_.data(c->made, &c->y))
        kv_give_up();
    c->bytes = c->n * kv_row_bytes(kind, out);
    c->live = c->n == pass_rows ? pass_real : c->n; /* a whole pass is computed as far as it is real */
    ptrdiff_t real = c->live * kv_row_bytes(kind, out);
    memset((uint8_t *)c->y + real, 0, (size_t)(c->bytes - real));
    return fits;
}

/* Gives the result; one that could not be computed is NaN. */
static void kv_end(kv_call *c, int worked, uint64_t *stack)
{
    if (!worked) memset(c->y, 0xff, (size_t)c->bytes);
    if (c->rows) torch_.drop(c->rows);
    stack[0] = (uint64_t)(uintptr_t)c->made;
}

/* (tensor [..., in], address of a kv_dense) -> [..., out] */
KV_API void kv_op_linear(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    const kv_dense *d = (const kv_dense *)(uintptr_t)stack[1];
    kv_call c;
    (void)inputs, (void)outputs;
    int fits = kv_begin(&c, stack, d->kind, d->matrix.in, d->matrix.out);
    kv_end(&c, fits && kv_dense_run(d, c.x, c.live, c.y), stack);
}

/* (tensor [..., width], address of a kv_norm) -> the same shape */
KV_API void kv_op_norm(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    const kv_norm *d = (const kv_norm *)(uintptr_t)stack[1];
    kv_call c;
    (void)inputs, (void)outputs;
    int fits = kv_begin(&c, stack, d->kind, d->width, d->width);
    if (fits) kv_norm_run(d, c.x, c.live, c.y);
    kv_end(&c, fits, stack);
}

/* A tensor of `dims` dimensions in fp32 or bf16: where it is, and its kind, or -1. */
static int kv_look(kv_tensor tensor, int64_t dims, int64_t **sizes, int64_t **strides, void **data)
{
    int64_t dim;
    int32_t dtype;
    torch_.dim(tensor, &dim);
    torch_.sizes(tensor, sizes);
    torch_.strides(tensor, strides);
    torch_.dtype(tensor, &dtype);
    torch_.data(tensor, data);
    if (dim != dims || (*sizes)[0] != 1 || ((*strides)[dims - 1] != 1 && (*sizes)[dims - 1] != 1)) return -1;
    return dtype == torch_.dtypes[KV_F32] ? KV_F32 : dtype == torch_.dtypes[KV_BF16] ? KV_BF16 : -1;
}

/* x [1, heads, rows, width], cosine and sine [1, rows, turned] -> the shape of x, in memory [rows, heads, width]. */
static kv_tensor kv_turned(int isa, kv_tensor x, kv_tensor cosine, kv_tensor sine)
{
    int64_t *sizes, *strides, *table, *table_strides, *other, *other_strides;
    void *from, *c, *s, *to;
    kv_tensor made = NULL;
    int kind = kv_look(x, 4, &sizes, &strides, &from);
    int fits = kind >= 0 && kv_look(cosine, 3, &table, &table_strides, &c) == kind &&
               kv_look(sine, 3, &other, &other_strides, &s) == kind;
    fits = fits && table[1] == sizes[2] && other[1] == sizes[2] && table[2] == other[2] && table[2] <= sizes[3] &&
           table[2] % 2 == 0 && (table[1] == 1 || (table_strides[1] == table[2] && other_strides[1] == table[2]));
    int64_t shape[4] = {1, 1, 1, 1}, apart[4] = {1, 1, 1, 1};
    if (fits) {
        memcpy(shape, sizes, sizeof shape);
        apart[1] = shape[3];
        apart[2] = shape[1] * shape[3];
        apart[0] = shape[2] * apart[2];
    }
    if (torch_.empty(4, shape, apart, torch_.dtypes[kind > 0], torch_.cpu, 0, &made) || torch_.data(made, &to))
        kv_give_up();
    ptrdiff_t item = kv_row_bytes(kind > 0 ? KV_BF16 : KV_F32, 1);
    if (!fits) {
        memset(to, 0xff, (size_t)item);
        return made;
    }
    int64_t live = shape[2] == pass_rows ? pass_real : shape[2];
    kv_rope(isa, kind, from, strides[1], strides[2], live, (int32_t)shape[1], (int32_t)shape[3], c, s,
            (int32_t)table[2], to);
    memset((uint8_t *)to + live * apart[2] * item, 0, (size_t)((shape[2] - live) * apart[2] * item));
    return made;
}

/* (queries, keys, cosine, sine, instruction set) -> (queries, keys), each turned by its row's position */
KV_API void kv_op_rope(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    kv_tensor given[4], made[2];
    (void)inputs, (void)outputs;
    for (int i = 0; i < 4; i++) given[i] = (kv_tensor)(uintptr_t)stack[i];
    for (int i = 0; i < 2; i++) made[i] = kv_turned((int)stack[4], given[i], given[2], given[3]);
    for (int i = 0; i < 4; i++) torch_.drop(given[i]);
    for (int i = 0; i < 2; i++) stack[i] = (uint64_t)(uintptr_t)made[i];
}
