/* Expert matrices on a CPU: packing, few-row products, the gated FFN. See kvasir.h for layouts and order.
 * One translation unit; each instruction set is chosen by function attributes, so no machine flags are needed,
 * and picked at run time by kv_isa_supported. C11 with GNU attributes: GCC or Clang. */
#include "kvasir.h"

/* ---- plain C ---- */
#define KV(name) portable_##name
#define KV_TARGET
#include "portable.h"
#include "body.h"
#undef KV
#undef KV_TARGET

#if defined(__x86_64__) || defined(__amd64__)
#define KV_X86 1
#include <immintrin.h>

/* ---- AVX2 with FMA ---- */
#define KV(name) avx2_##name
#define KV_TARGET __attribute__((target("avx2,fma")))
#define VL 8
#define WIDE 4
#define NARROW 2
#define MANY 4
#define V __m256
#define U __m256i
#define v_zero() _mm256_setzero_ps()
#define v_load(p) _mm256_loadu_ps(p)
#define v_store(p, a) _mm256_storeu_ps(p, a)
#define v_set(f) _mm256_set1_ps(f)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_add(a, b) _mm256_add_ps(a, b)
#define v_mul(a, b) _mm256_mul_ps(a, b)
#define v_low16(u) _mm256_castsi256_ps(_mm256_slli_epi32(u, 16))
#define v_high16(u) _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)))
#define v_bf16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define u_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define u_four(u, i) \
    (i == 3 ? _mm256_srli_epi16(u, 12) : _mm256_and_si256(_mm256_srli_epi16(u, 4 * i), _mm256_set1_epi16(15)))
#define W8 __m256i
#define S8 __m256i
#define s8_zero() _mm256_setzero_si256()
#define s8_load(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p)))
#define s8_dot(s, w, pair) _mm256_add_epi32(s, _mm256_madd_epi16(w, _mm256_set1_epi32(pair)))
#define s8_value(s) _mm256_cvtepi32_ps(s)
#include "vector.h"
#include "body.h"
#undef KV
#undef KV_TARGET
#undef VL
#undef WIDE
#undef NARROW
#undef MANY
#undef V
#undef U
#undef v_zero
#undef v_load
#undef v_store
#undef v_set
#undef v_fma
#undef v_add
#undef v_mul
#undef v_low16
#undef v_high16
#undef v_bf16
#undef u_load
#undef u_four
#undef W8
#undef S8
#undef s8_zero
#undef s8_load
#undef s8_dot
#undef s8_value

/* ---- AVX-512, without and with VNNI ---- */
#define VL 16
#define WIDE 2
#define NARROW 2
#define MANY 8
#define V __m512
#define U __m512i
#define v_zero() _mm512_setzero_ps()
#define v_load(p) _mm512_loadu_ps(p)
#define v_store(p, a) _mm512_storeu_ps(p, a)
#define v_set(f) _mm512_set1_ps(f)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_add(a, b) _mm512_add_ps(a, b)
#define v_mul(a, b) _mm512_mul_ps(a, b)
#define v_low16(u) _mm512_castsi512_ps(_mm512_slli_epi32(u, 16))
#define v_high16(u) _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000u)))
#define v_bf16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define u_load(p) _mm512_loadu_si512((const void *)(p))
#define u_four(u, i) \
    (i == 3 ? _mm512_srli_epi16(u, 12) : _mm512_and_si512(_mm512_srli_epi16(u, 4 * i), _mm512_set1_epi16(15)))
#define W8 __m512i
#define S8 __m512i
#define s8_zero() _mm512_setzero_si512()
#define s8_load(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define s8_value(s) _mm512_cvtepi32_ps(s)

#define KV(name) avx512_##name
#define KV_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define s8_dot(s, w, pair) _mm512_add_epi32(s, _mm512_madd_epi16(w, _mm512_set1_epi32(pair)))
#include "vector.h"
#include "body.h"
#undef KV
#undef KV_TARGET
#undef s8_dot

#define KV(name) vnni_##name
#define KV_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define s8_dot(s, w, pair) _mm512_dpwssd_epi32(s, w, _mm512_set1_epi32(pair))
#include "vector.h"
#include "body.h"
#undef KV
#undef KV_TARGET

#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define KV_NEON 1
#include <arm_neon.h>

/* ---- NEON ---- */
typedef struct { int32x4_t a, b; } kv_pairs32; /* outputs 0 and 1, outputs 2 and 3; two partial sums each */

KV_INLINE kv_pairs32 neon_s8_dot(kv_pairs32 s, int16x8_t w, int32_t pair)
{
    int16x4_t x = vreinterpret_s16_s32(vdup_n_s32(pair));
    s.a = vmlal_s16(s.a, vget_low_s16(w), x);
    s.b = vmlal_s16(s.b, vget_high_s16(w), x);
    return s;
}

KV_INLINE int16x8_t neon_u_four(uint8x16_t u, int shift)
{
    uint16x8_t moved = vshlq_u16(vreinterpretq_u16_u8(u), vdupq_n_s16((int16_t)-shift));
    return vreinterpretq_s16_u16(vandq_u16(moved, vdupq_n_u16(15)));
}

#define KV(name) neon_##name
#define KV_TARGET
#define VL 4
#define WIDE 8
#define NARROW 4
#define MANY 4
#define V float32x4_t
#define U uint8x16_t
#define v_zero() vdupq_n_f32(0.0f)
#define v_load(p) vld1q_f32(p)
#define v_store(p, a) vst1q_f32(p, a)
#define v_set(f) vdupq_n_f32(f)
#define v_fma(a, b, c) vfmaq_f32(c, a, b)
#define v_add(a, b) vaddq_f32(a, b)
#define v_mul(a, b) vmulq_f32(a, b)
#define v_low16(u) vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(u), 16))
#define v_high16(u) vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(u), vdupq_n_u32(0xffff0000u)))
#define v_bf16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
#define u_load(p) vld1q_u8(p)
#define u_four(u, i) neon_u_four(u, 4 * i)
#define W8 int16x8_t
#define S8 kv_pairs32
#define s8_zero() ((kv_pairs32){vdupq_n_s32(0), vdupq_n_s32(0)})
#define s8_load(p) vmovl_s8(vld1_s8((const int8_t *)(p)))
#define s8_dot(s, w, pair) neon_s8_dot(s, w, pair)
#define s8_value(s) vcvtq_f32_s32(vpaddq_s32(s.a, s.b))
#include "vector.h"
#include "body.h"
#undef KV
#undef KV_TARGET
#endif

/* ---- the instruction sets, best last ---- */
typedef struct {
    const char *name;
    int (*supported)(void);
    void (*prepare)(int, int, const float *, ptrdiff_t, int, uint8_t *, kv_rows *);
    void (*linear)(const kv_matrix *, const kv_rows *, int, float *, ptrdiff_t, int, int, float *);
    void (*silu_mul)(float *, const float *, ptrdiff_t);
    void (*widen)(const uint16_t *, ptrdiff_t, float *);
    void (*narrow)(const float *, ptrdiff_t, uint16_t *);
    float (*squares)(int, const void *, ptrdiff_t);
    void (*dense)(const kv_matrix *, const float *, const kv_rows *, int, int, void *);
    void (*norm)(int, const void *, const float *, float, ptrdiff_t, void *);
    void (*combine)(int, const void *, const float *, int, ptrdiff_t, void *);
    void (*turn)(int, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t, void *);
} kv_isa;

static int kv_everywhere(void) { return 1; }

#if KV_X86
static int kv_has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static int kv_has_avx512(void)
{
    return kv_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int kv_has_vnni(void) { return kv_has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

#define ISA(name, supported)                                              \
    {#name,        supported,    name##_prepare, name##_linear,           \
     name##_silu_mul, name##_widen, name##_narrow,  name##_squares, \
     name##_dense, name##_norm,     name##_combine, name##_turn}
static const kv_isa kv_isas[] = {
    ISA(portable, kv_everywhere),
#if KV_X86
    ISA(avx2, kv_has_avx2),
    ISA(avx512, kv_has_avx512),
    ISA(vnni, kv_has_vnni),
#elif KV_NEON
    ISA(neon, kv_everywhere),
#endif
};

enum { KV_ISAS = sizeof kv_isas / sizeof *kv_isas };

KV_API int32_t kv_isa_count(void) { return KV_ISAS; }
KV_API const char *kv_isa_name(int32_t isa) { return isa >= 0 && isa < KV_ISAS ? kv_isas[isa].name : ""; }

KV_API int32_t kv_isa_supported(int32_t isa)
{
#if KV_X86
    __builtin_cpu_init();
#endif
    return isa >= 0 && isa < KV_ISAS && kv_isas[isa].supported();
}

/* Whether plain C has a fused multiply-add in hardware here; without, it is right but very slow. */
KV_API int32_t kv_portable_is_fast(void)
{
#if defined(__FP_FAST_FMAF)
    return 1;
#else
    return 0;
#endif
}

/* ---- packing ---- */
KV_API int64_t kv_packed_bytes(int32_t kind, int32_t out, int32_t in)
{
    return (int64_t)((out + PANEL - 1) / PANEL) * kv_panel_bytes(kind, in);
}

typedef struct {
    int kind, out, in;
    uint8_t *values;  /* f32, bf16, int8: [out][in]; int4: [out][ceil(in/32) * 16] */
    uint8_t *scale;   /* int8: float [out][ceil(in/128)]; int4: bf16 [out][ceil(in/32)] */
    uint8_t *minimum; /* int4: bf16 [out][ceil(in/32)] */
} kv_plain;

/* One element between the plain and the packed form, in the direction `unpack` says. */
#define MOVE(TYPE, PLAIN, PACKED)                                \
    do {                                                         \
        TYPE *plain_ = (TYPE *)(PLAIN), *packed_ = (TYPE *)(PACKED); \
        if (unpack)                                              \
            *plain_ = *packed_;                                  \
        else                                                     \
            *packed_ = *plain_;                                  \
    } while (0)

static void kv_move_int4(const kv_plain *m, ptrdiff_t o, int g, int width, uint8_t *packed, int lane, int unpack)
{
    ptrdiff_t groups = (m->in + GROUP - 1) / GROUP, cell = o * groups + g;
    uint8_t *group = m->values + cell * (GROUP / 2), *q = packed + PANEL * 4 + lane * 4;
    MOVE(uint16_t, m->scale + cell * 2, packed + lane * 2);
    MOVE(uint16_t, m->minimum + cell * 2, packed + PANEL * 2 + lane * 2);
    for (int e = 0; e < width; e++) {
        uint8_t *plain = group + (e & 15), *at = q + e / 8 * PANEL * 4 + 2 * (e & 1) + (e >> 2 & 1);
        int plain_shift = e & 16 ? 4 : 0, shift = e & 2 ? 4 : 0;
        if (unpack)
            *plain = (uint8_t)(*plain | (*at >> shift & 15) << plain_shift);
        else
            *at = (uint8_t)(*at | (*plain >> plain_shift & 15) << shift);
    }
}

static void kv_move_block(const kv_plain *m, int p, int b, int width, uint8_t *packed, int unpack)
{
    int lanes = kv_min(PANEL, m->out - p * PANEL), blocks = (m->in + BLOCK - 1) / BLOCK;
    for (int lane = 0; lane < lanes; lane++) {
        ptrdiff_t o = (ptrdiff_t)p * PANEL + lane, at = o * m->in + b * BLOCK;
        switch (m->kind) {
        case KV_F32:
            for (int k = 0; k < width; k++) MOVE(uint32_t, m->values + (at + k) * 4, packed + (k * PANEL + lane) * 4);
            break;
        case KV_BF16:
            for (int k = 0; k < width; k++)
                MOVE(uint16_t, m->values + (at + k) * 2, packed + (k / 2 * PANEL + lane) * 4 + k % 2 * 2);
            break;
        case KV_INT8:
            MOVE(uint32_t, m->scale + (o * blocks + b) * 4, packed + lane * 4);
            for (int k = 0; k < width; k++)
                MOVE(uint8_t, m->values + at + k, packed + PANEL * 4 + (k / 2 * PANEL + lane) * 2 + k % 2);
            break;
        default:
            for (int k = 0; k < width; k += GROUP)
                kv_move_int4(m, o, (b * BLOCK + k) / GROUP, kv_min(GROUP, width - k),
                             packed + k / GROUP * kv_block_bytes(KV_INT4, GROUP), lane, unpack);
        }
    }
}

/* Packs or unpacks panels [begin, end). The target must be zeroed first; plain pointers are those of output 0. */
KV_API void kv_repack(int32_t kind, int32_t out, int32_t in, void *values, void *scale, void *minimum, void *packed,
                      int32_t begin, int32_t end, int32_t unpack)
{
    kv_plain m = {kind, out, in, values, scale, minimum};
    int blocks = (in + BLOCK - 1) / BLOCK;
    uint8_t *at = (uint8_t *)packed + begin * kv_panel_bytes(kind, in);
    for (int p = begin; p < end; p++)
        for (int b = 0; b < blocks; b++) {
            int width = kv_min(BLOCK, in - b * BLOCK);
            kv_move_block(&m, p, b, width, at, unpack);
            at += kv_block_bytes(kind, width);
        }
}

/* ---- products ---- */
static ptrdiff_t kv_rows_bytes(int kind, int in, int n)
{
    ptrdiff_t cells = (ptrdiff_t)n * ((in + BLOCK - 1) / BLOCK);
    if (kind == KV_F32 || kind == KV_BF16) return kv_up((ptrdiff_t)n * (in + 1) * 4, 64);
    return (kv_up(cells, 16) + kv_up(4 * cells, 16)) * 4 + cells * BLOCK * 2;
}

KV_API int64_t kv_linear_scratch(const kv_matrix *m, int32_t n)
{
    return ROWS * PANEL * 4 + kv_rows_bytes(m->kind, m->in, kv_min(n, ROWS));
}

/* y[n, out] (rows `y_stride` floats apart), outputs of panels [begin, end), from x[n, in]. */
KV_API void kv_linear(int32_t isa, const kv_matrix *m, const float *x, int64_t x_stride, int32_t n, float *y,
                      int64_t y_stride, int32_t begin, int32_t end, uint8_t *scratch)
{
    const kv_isa *with = &kv_isas[isa];
    float *total = (float *)scratch;
    for (ptrdiff_t r = 0; r < n; r += ROWS) {
        kv_rows rows;
        int some = kv_min(ROWS, n - (int)r);
        with->prepare(m->kind, m->in, x + r * x_stride, x_stride, some, scratch + ROWS * PANEL * 4, &rows);
        with->linear(m, &rows, some, y + r * y_stride, y_stride, begin, end, total);
    }
}

KV_API void kv_silu_mul(int32_t isa, float *gate, const float *up, int64_t n) { kv_isas[isa].silu_mul(gate, up, n); }

typedef struct {
    kv_matrix gate, up, down;
} kv_expert;

KV_API int64_t kv_ffn_scratch(const kv_expert *e, int32_t n)
{
    int some = kv_min(n, ROWS);
    ptrdiff_t rows = kv_rows_bytes(e->gate.kind, e->gate.in, some), up = kv_rows_bytes(e->up.kind, e->up.in, some);
    ptrdiff_t down = kv_rows_bytes(e->down.kind, e->down.in, some);
    rows = up > rows ? up : rows;
    rows = down > rows ? down : rows;
    return ROWS * PANEL * 4 + rows + 2 * kv_up((ptrdiff_t)some * e->gate.out * 4, 64);
}

static void kv_panels(const kv_isa *with, const kv_matrix *m, const kv_rows *rows, int n, float *y, float *total)
{
    with->linear(m, rows, n, y, m->out, 0, (m->out + PANEL - 1) / PANEL, total);
}

/* down(silu(gate(x)) * up(x)) for at most ROWS contiguous rows. */
static void kv_ffn_some(const kv_isa *with, const kv_expert *e, const float *x, int n, float *y, uint8_t *scratch)
{
    int width = e->gate.out;
    ptrdiff_t part = kv_up((ptrdiff_t)n * width * 4, 64);
    float *total = (float *)scratch, *gate = (float *)(scratch + ROWS * PANEL * 4);
    float *up = (float *)((uint8_t *)gate + part);
    uint8_t *rest = (uint8_t *)up + part;
    kv_rows rows;
    with->prepare(e->gate.kind, e->gate.in, x, e->gate.in, n, rest, &rows);
    kv_panels(with, &e->gate, &rows, n, gate, total);
    if (e->up.kind != e->gate.kind) with->prepare(e->up.kind, e->up.in, x, e->up.in, n, rest, &rows);
    kv_panels(with, &e->up, &rows, n, up, total);
    with->silu_mul(gate, up, (ptrdiff_t)n * width);
    with->prepare(e->down.kind, width, gate, width, n, rest, &rows);
    kv_panels(with, &e->down, &rows, n, y, total);
}

/* y[n, out] = down(silu(gate(x)) * up(x)) for contiguous rows x[n, in]. */
KV_API void kv_ffn(int32_t isa, const kv_expert *e, const float *x, int32_t n, float *y, uint8_t *scratch)
{
    for (ptrdiff_t r = 0; r < n; r += ROWS)
        kv_ffn_some(&kv_isas[isa], e, x + r * e->gate.in, kv_min(ROWS, n - (int)r), y + r * e->down.out, scratch);
}

/* ---- a whole call ---- */

/* Bytes of one row of `n` fp32 or bf16 values. */
static ptrdiff_t kv_row_bytes(int kind, ptrdiff_t n) { return n * (kind == KV_F32 ? 4 : 2); }

KV_API int64_t kv_group_scratch(const kv_expert *const *experts, int32_t count, int32_t most)
{
    ptrdiff_t rows = 0, rest = 0;
    for (int i = 0; i < count; i++) {
        ptrdiff_t both = kv_up((ptrdiff_t)kv_min(most, ROWS) * experts[i]->gate.in * 4, 64) +
                         kv_up((ptrdiff_t)kv_min(most, ROWS) * experts[i]->down.out * 4, 64);
        ptrdiff_t ffn = kv_ffn_scratch(experts[i], most);
        rows = both > rows ? both : rows;
        rest = ffn > rest ? ffn : rest;
    }
    return rows + rest;
}

/* `count` experts, the i-th on its `sizes[i]` rows: row j of all of them is read at from[j] and its output written at
 * to[j]. Rows and outputs are fp32 or bf16, as `in_kind` and `out_kind` say; between them all is as in kv_ffn. */
KV_API void kv_group(int32_t isa, const kv_expert *const *experts, const int32_t *sizes, int32_t count,
                     const void *const *from, void *const *to, int32_t in_kind, int32_t out_kind, uint8_t *scratch)
{
    const kv_isa *with = &kv_isas[isa];
    for (int i = 0; i < count; i++) {
        const kv_expert *e = experts[i];
        int in = e->gate.in, out = e->down.out;
        for (int left = sizes[i], some; left > 0; left -= some, from += some, to += some) {
            some = kv_min(ROWS, left);
            float *x = (float *)scratch, *y = (float *)(scratch + kv_up((ptrdiff_t)some * in * 4, 64));
            uint8_t *rest = (uint8_t *)y + kv_up((ptrdiff_t)some * out * 4, 64);
            for (ptrdiff_t r = 0; r < some; r++) {
                if (in_kind == KV_F32)
                    memcpy(x + r * in, from[r], (size_t)in * 4);
                else
                    with->widen(from[r], in, x + r * in);
            }
            kv_ffn_some(with, e, x, some, y, rest);
            for (ptrdiff_t r = 0; r < some; r++) {
                if (out_kind == KV_F32)
                    memcpy(to[r], y + r * out, (size_t)out * 4);
                else
                    with->narrow(y + r * out, out, to[r]);
            }
        }
    }
}

/* How many of `count` outputs are not finite, or outside low to high times the size of their row (a size counts as
 * 1e-12 at least). Output o is of row o / each, or of row_of[o] if that is given. */
KV_API int32_t kv_outside(int32_t isa, int32_t kind, const void *rows, const int32_t *row_of, int32_t each,
                          const void *outputs, int32_t count, int64_t width, float low, float high)
{
    const kv_isa *with = &kv_isas[isa];
    ptrdiff_t step = kv_row_bytes(kind, width), row = -1;
    float size = 0.0f;
    int outside = 0;
    for (ptrdiff_t o = 0; o < count; o++) {
        ptrdiff_t of = row_of ? row_of[o] : o / each;
        if (of != row) size = sqrtf(with->squares(kind, (const uint8_t *)rows + of * step, width));
        if (size < 1e-12f) size = 1e-12f;
        row = of;
        float ratio = sqrtf(with->squares(kind, (const uint8_t *)outputs + o * step, width)) / size;
        outside += !(ratio >= low && ratio <= high);
    }
    return outside;
}

#include "attention.h"
#include "dense.h"
#include "operators.h"
#include "attending.h"
