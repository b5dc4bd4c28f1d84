/* Vectors of the widest unit this machine has, written with the vector extensions of GCC and Clang.

   No instruction set is required: a compiler without the matching registers splits a vector into what it has. W is the
   number of floats per vector, COLS the number of columns that one register tile of `tile` (attention.c) covers. */
#ifndef CLEARHEAD_VECTOR_H
#define CLEARHEAD_VECTOR_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { W = 16, VECS = 4 };
#elif defined(__AVX__)
enum { W = 8, VECS = 2 };
#elif defined(__ARM_NEON)
enum { W = 4, VECS = 4 };
#else
enum { W = 4, VECS = 2 };
#endif
enum { COLS = W * VECS };

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4), may_alias));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec all(float x) { return x - (vec){}; }
static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec4 __attribute__((vector_size(16), aligned(4), may_alias));

/* by quarters: a chain of W additions would take longer than a short row's other work */
static inline float sum(vec x) {
    float parts[W];
    store(parts, x);
    vec4 s = *(vec4 *)parts;
    for (int i = 4; i < W; i += 4) s += *(vec4 *)(parts + i);
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static inline int32_t isum(ivec x) {
    int32_t parts[W];
    *(ivec *)parts = x;
    ivec4 s = *(ivec4 *)parts;
    for (int i = 4; i < W; i += 4) s += *(ivec4 *)(parts + i);
    return s[0] + s[1] + s[2] + s[3];
}

static inline float highest(vec x) {
    float parts[W];
    store(parts, x);
    vec4 s = *(vec4 *)parts;
    for (int i = 4; i < W; i += 4) {
        vec4 y = *(vec4 *)(parts + i);
        ivec4 more = y > s;
        s = (vec4)((more & (ivec4)y) | (~more & (ivec4)s));
    }
    float low = s[0] > s[1] ? s[0] : s[1], high = s[2] > s[3] ? s[2] : s[3];
    return low > high ? low : high;
}

/* e^x for x <= 88, to about 2 units in the last place; below -87 it is 0, NaN stays NaN */
static inline vec exp_of(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer that sits in the low bits */
    ivec tiny = x < all(-87.0f);
    x = pick(tiny, all(-87.0f), x);
    vec shifted = x * 1.44269504f + magic;
    vec whole = shifted - magic;
    vec r = x - whole * 0.693145752f;
    r = r - whole * 1.42860677e-6f;
    vec y = r * (1.0f / 720) + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    ivec power = ((ivec)shifted - 0x4b400000 + 127) << 23;
    return pick(tiny, all(0.0f), y * (vec)power);
}

/* Ask for n floats ahead of their use: rows of one group lie a whole row of all groups apart, which no hardware
   prefetcher follows. */
static inline void soon(const float *p, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* zeroed floats on a cache line, or NULL */
static inline float *floats(int64_t n) {
    float *p = aligned_alloc(64, round_up((n > 0 ? n : 1) * 4, 64));
    if (p) memset(p, 0, (n > 0 ? n : 1) * 4);
    return p;
}

#endif
