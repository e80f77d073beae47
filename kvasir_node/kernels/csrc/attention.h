/* Attention of rows that see all positions up to their own: of many requests in one call, each over its own memory.
 *
 * For a query q (times the scaling, rounded) and the keys k[p] and values v[p] of positions p = 0 to its own:
 *
 *   m = -infinity;  l = 0;  o = 0
 *   for each block of SPAN positions, ascending (the last may be shorter)
 *     s[p] = sum over d of q[d] * k[p,d]: lane j of eight takes d = j, j + 8, ... in turn by fma; kv_tree adds lanes
 *     M = max(m, max s);  f = exp(m - M);  w[p] = exp(s[p] - M)
 *     l = fma(l, f, sum of w), lane j of eight taking p = j, j + 8, ... in turn; kv_tree adds the lanes
 *     t = 0;  t = fma(w[p], v[p], t) for p ascending;  o = fma(o, f, t);  m = M
 *   result = o / l, for bf16 rounded once
 *
 * in IEEE fp32 (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). A row's bits depend on its
 * own query and positions only: not on the rows beside it, the capacity of the memory or the instruction set. AVX-512
 * takes AVX2's: lanes are eight, and where there are many positions the time goes into reading them. */

enum {
    SPAN = 64,    /* positions a block */
    QUERIES = 64, /* queries of one key head taken through the positions at once, or one row's if those are more */
    AHEAD = 2048, /* bytes by which keys are asked for ahead */
};

/* A layer's rows: strides in elements, the elements of a head one behind the other. */
typedef struct {
    int32_t kind, heads, key_heads, dim, value_dim, rows; /* KV_F32 or KV_BF16; dims multiples of eight */
    int32_t padding;                                      /* rows from here on are zeros */
    float scaling;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
} kv_attention;

/* Consecutive new rows of one request, and its memory. */
typedef struct {
    uint8_t *const *planes; /* per layer: keys [key heads][capacity][dim] and values [key heads][capacity][value dim] */
    int64_t place;          /* its first row's place among the rows */
    int64_t start;          /* its first row's position */
    int64_t capacity;
    int64_t rows;
} kv_span;

/* Queries on their way: query i is of row i / group. */
typedef struct {
    int most, group, rows, start;
    float *query;   /* [most][dim] */
    float *total;   /* [most][value dim] */
    float *score;   /* [most][SPAN] */
    float *largest, *sum, *factor; /* [most] */
} kv_few;

KV_INLINE ptrdiff_t kv_item_bytes(int kind) { return kind == KV_F32 ? 4 : 2; }

KV_INLINE float kv_item(int kind, const uint8_t *from, ptrdiff_t at)
{
    return kind == KV_F32 ? ((const float *)from)[at] : kv_bits_to_float((uint32_t)((const uint16_t *)from)[at] << 16);
}

/* How many positions of the block from `at` query `i` sees. */
KV_INLINE int kv_seen(const kv_few *few, int i, int at) { return kv_min(SPAN, few->start + i / few->group + 1 - at); }

KV_INLINE float kv_tree(const float *lane)
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* exp of v <= 0, zero below -80, within 1e-7 of its value. */
KV_INLINE float kv_exp(float v)
{
    float e = kv_exp_within(v);
    return kv_bits_to_float(kv_float_to_bits(e) & ((uint32_t)(v < -80.0f) - 1u)); /* as a choice GCC would branch */
}

/* ---- plain C ---- */
typedef struct {
    float v[8];
} kv_eight;

KV_INLINE kv_eight kv_e_set(float f)
{
    kv_eight a;
    for (int i = 0; i < 8; i++) a.v[i] = f;
    return a;
}

KV_INLINE kv_eight kv_e_load(const float *p)
{
    kv_eight a;
    memcpy(a.v, p, sizeof a.v);
    return a;
}

KV_INLINE kv_eight kv_e_bf16(const uint16_t *p)
{
    kv_eight a;
    for (int i = 0; i < 8; i++) a.v[i] = kv_bits_to_float((uint32_t)p[i] << 16);
    return a;
}

KV_INLINE kv_eight kv_e_add(kv_eight a, kv_eight b)
{
    for (int i = 0; i < 8; i++) a.v[i] += b.v[i];
    return a;
}

KV_INLINE kv_eight kv_e_fma(kv_eight a, kv_eight b, kv_eight c)
{
    for (int i = 0; i < 8; i++) c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}

KV_INLINE kv_eight kv_e_max(kv_eight a, kv_eight b)
{
    for (int i = 0; i < 8; i++) b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return b;
}

KV_INLINE void kv_e_sums(const kv_eight *x, float *to)
{
    for (int i = 0; i < 8; i++) to[i] = kv_tree(x[i].v);
}

#define KV(name) portable_##name
#define KV_TARGET
#define KV_TILE static __attribute__((noinline)) /* one for all sizes: short to compile */
#define E kv_eight
#define e_zero() kv_e_set(0.0f)
#define e_set(f) kv_e_set(f)
#define e_load(p) kv_e_load(p)
#define e_store(p, a) memcpy(p, (a).v, sizeof (a).v)
#define e_bf16(p) kv_e_bf16(p)
#define e_add(a, b) kv_e_add(a, b)
#define e_fma(a, b, c) kv_e_fma(a, b, c)
#define e_max(a, b) kv_e_max(a, b)
#define e_sums(x, to) kv_e_sums(x, to)
#include "attend.h"
#undef KV
#undef KV_TARGET
#undef KV_TILE
#undef E
#undef e_zero
#undef e_set
#undef e_load
#undef e_store
#undef e_bf16
#undef e_add
#undef e_fma
#undef e_max
#undef e_sums

#if KV_X86
/* ---- AVX2 with FMA ---- */
#define KV(name) avx2_##name
#define KV_TARGET __attribute__((target("avx2,fma")))

/* Pairs of vectors are added crosswise, so that eight sums are one vector in the end. */
KV_TARGET KV_INLINE void avx2_e_sums(const __m256 *x, float *to)
{
    __m256 four[4], two[2];
    for (int i = 0; i < 4; i++) /* x[i] below, x[i + 4] above */
        four[i] = _mm256_add_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20),
                                _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    for (int i = 0; i < 2; i++)
        two[i] = _mm256_add_ps(_mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                               _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0xee));
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                                       _mm256_shuffle_ps(two[0], two[1], 0xdd)));
}

#define KV_TILE KV_INLINE
#define E __m256
#define e_zero() _mm256_setzero_ps()
#define e_set(f) _mm256_set1_ps(f)
#define e_load(p) _mm256_loadu_ps(p)
#define e_store(p, a) _mm256_storeu_ps(p, a)
#define e_bf16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define e_add(a, b) _mm256_add_ps(a, b)
#define e_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define e_max(a, b) _mm256_max_ps(a, b)
#define e_sums(x, to) avx2_e_sums(x, to)
#include "attend.h"
#undef KV
#undef KV_TARGET
#elif KV_NEON
/* ---- NEON ---- */
typedef struct {
    float32x4_t a, b;
} kv_fours;

KV_INLINE kv_fours neon_e_bf16(const uint16_t *p)
{
    uint16x8_t both = vld1q_u16(p);
    return (kv_fours){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(both), 16)),
                      vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(both), 16))};
}

/* a > b ? a : b, which vmaxq is not for NaN. */
KV_INLINE float32x4_t neon_e_more(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

KV_INLINE void neon_e_sums(const kv_fours *x, float *to)
{
    for (int i = 0; i < 8; i += 4) {
        float32x4_t four[4], low, high;
        for (int j = 0; j < 4; j++) four[j] = vaddq_f32(x[i + j].a, x[i + j].b);
        float32x4_t two0 = vaddq_f32(vcombine_f32(vget_low_f32(four[0]), vget_low_f32(four[1])),
                                     vcombine_f32(vget_high_f32(four[0]), vget_high_f32(four[1])));
        float32x4_t two1 = vaddq_f32(vcombine_f32(vget_low_f32(four[2]), vget_low_f32(four[3])),
                                     vcombine_f32(vget_high_f32(four[2]), vget_high_f32(four[3])));
        low = vuzp1q_f32(two0, two1);
        high = vuzp2q_f32(two0, two1);
        vst1q_f32(to + i, vaddq_f32(low, high));
    }
}

#define KV(name) neon_##name
#define KV_TARGET
#define KV_TILE KV_INLINE
#define E kv_fours
#define e_zero() ((kv_fours){vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)})
#define e_set(f) ((kv_fours){vdupq_n_f32(f), vdupq_n_f32(f)})
#define e_load(p) ((kv_fours){vld1q_f32(p), vld1q_f32((p) + 4)})
#define e_store(p, x) (vst1q_f32(p, (x).a), vst1q_f32((p) + 4, (x).b))
#define e_bf16(p) neon_e_bf16(p)
#define e_add(x, y) ((kv_fours){vaddq_f32((x).a, (y).a), vaddq_f32((x).b, (y).b)})
#define e_fma(x, y, z) ((kv_fours){vfmaq_f32((z).a, (x).a, (y).a), vfmaq_f32((z).b, (x).b, (y).b)})
#define e_max(x, y) neon_e_max(x, y)
#define e_sums(x, to) neon_e_sums(x, to)

KV_INLINE kv_fours neon_e_max(kv_fours x, kv_fours y)
{
    return (kv_fours){neon_e_more(x.a, y.a), neon_e_more(x.b, y.b)};
}
#include "attend.h"
#undef KV
#undef KV_TARGET
#endif

static ptrdiff_t kv_most_queries(const kv_attention *a)
{
    ptrdiff_t group = a->heads / a->key_heads;
    return group > QUERIES ? group : QUERIES;
}

KV_API int64_t kv_attend_scratch(const kv_attention *a)
{
    return kv_most_queries(a) * (kv_up(a->dim, 8) + kv_up(a->value_dim, 8) + SPAN + 3) * 4;
}

/* Stores the new keys and values of `count` spans, and writes their rows' attention and the padding's zeros to
 * out[rows][heads][value_dim]; rows of no span stay as they are. */
KV_API void kv_attend(int32_t isa, const kv_attention *a, const kv_span *spans, int32_t count, int32_t layer,
                      const void *query, const void *key, const void *value, void *out, float *scratch)
{
    const ptrdiff_t most = kv_most_queries(a), row = (ptrdiff_t)a->heads * a->value_dim * kv_item_bytes(a->kind);
    kv_few few = {.most = (int)most, .group = a->heads / a->key_heads};
    few.query = scratch;
    few.total = few.query + most * a->dim;
    few.score = few.total + most * a->value_dim;
    few.largest = few.score + most * SPAN;
    few.sum = few.largest + most;
    few.factor = few.sum + most;
    memset((uint8_t *)out + a->padding * row, 0, (size_t)((a->rows - a->padding) * row));
#if KV_X86
    if (isa) {
        avx2_attend(a, spans, count, layer, query, key, value, out, &few);
        return;
    }
#elif KV_NEON
    if (isa) {
        neon_attend(a, spans, count, layer, query, key, value, out, &few);
        return;
    }
#endif
    (void)isa;
    portable_attend(a, spans, count, layer, query, key, value, out, &few);
}
