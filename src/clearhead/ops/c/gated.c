/* What happens to the scores of gated attention between its matrix products, one pass over a tile of them.

   gated_forward   scores S -> weights M exp(S - max) in place, and the sums of each row; returns the number of open edges
   gated_backward  scores S and G = dout . v -> M P and dS in place, and each row's share of the bias' gradient
   gated_gather    out[i] = sum of w[i][j] v[j] / Z over the weights that are not zero
   gated_settle    out[i] = mixed[i] / Z, from the tile's own layout
   gated_turn      the transposes of n matrices: keys along a row make a faster product than keys along a column

   A tile is [heads, reps, rows, cols]: `reps` query heads share each key head, queries are row0 + 0..rows-1 and keys
   col0 + 0..cols-1, where col0 and cols are multiples of 16. Query i sees keys first[i]..i; all else becomes 0.

   With p = exp(S - max) and c = exp(-(max + b)), the probability of a gate is p / (p + c): one exponential serves the
   softmax and the gate, and both passes evaluate the same expression on the same bits, so they see the same gates.
   Where max + b > HIGH, p may vanish while the gate is open, and the gate takes an exponential of its own.
   Formulas of the gradients and of the noise: ops/gated.py. Nothing depends on the number of threads. */
#include "transpose.h"

#include <math.h>

enum { SAMPLED, HARD, OPEN };
#define HIGH 40.0f

typedef struct {
    int64_t heads, reps, rows, cols, head0, row0, col0;
    int64_t t, groups; /* positions, and key heads per batch entry */
    int32_t mode, exact /* the gate's slope is that of P(M = 1) */, threads;
    float slope;
    const float *bias, *sink;  /* [b * h]; sink may be NULL */
    const uint32_t *keys;      /* [b * h, 2] */
    const int32_t *first;      /* [b, t] or NULL */
    float *top, *norm;         /* max, 1 / sum exp(S - max) [b * h, t]: written forward, read backward */
    uint32_t *words;           /* sum of the words of open edges [b * h, t], or NULL */
    float *lse, *expected, *leak;
    int32_t *opened;
    const float *delta, *price; /* out . dout, and the gradient of `expected` */
    float *dbias;
} Tile;

typedef struct {
    float top, bias, c;
    uint32_t start, second; /* of the noise */
    int64_t low, high;      /* visible columns of the tile: low..high-1 */
    int64_t from, to;       /* the same, in whole vectors */
    float reach;            /* 1 + slope * (i - j) at column `from` */
} Row;

static inline uint32_t scrambled(uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0x735A2D97u;
    return x ^ x >> 15;
}

static inline uvec lanes(void) {
    uvec x = {};
    for (int i = 0; i < W; i++) x[i] = (uint32_t)i;
    return x;
}

static inline vec ramp(float at, float step) {
    vec x = {};
    for (int i = 0; i < W; i++) x[i] = at + step * (float)i;
    return x;
}

/* The random words of one row at W columns, whose numbers times 0xC2B2AE3D are given */
static inline uvec words(const Row *row, uvec columns) {
    uvec x = columns ^ row->start;
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) + row->second;
    x = x * 0x735A2D97u;
    return x ^ x >> 15;
}

static inline vec uniform(uvec word) {
    return (__builtin_convertvector((ivec)(word >> 9), vec) + 0.5f) * 0x1p-23f;
}

/* P(open) : P(closed) of W edges as a ratio of two numbers */
static inline void odds(const Row *row, vec s, vec p, int wide, vec *yes, vec *no) {
    *yes = p, *no = all(row->c);
    if (wide) {
        vec x = s + row->bias, size = pick(x > all(0.0f), x, -x), e = exp_of(-size);
        *yes = pick(x > all(0.0f), all(1.0f), e);
        *no = pick(x > all(0.0f), e, all(1.0f));
    }
}

/* u < yes / (yes + no), without the rounding of a quotient */
static inline ivec is_open(const Row *row, vec s, vec yes, vec whole, uvec word, int mode) {
    if (mode == HARD) return s + row->bias > all(0.0f);
    return uniform(word) * whole < yes;
}

/* Where head `head` and row r of the tile find their numbers in arrays [b * h, t] */
static inline int64_t place(const Tile *a, int64_t head, int64_t r) {
    return (a->head0 * a->reps + head) * a->t + a->row0 + r;
}

static Row begin(const Tile *a, int64_t head, int64_t r, float *s) {
    int64_t at = a->head0 * a->reps + head, i = a->row0 + r;
    int64_t first = a->first ? a->first[(a->head0 + head / a->reps) / a->groups * a->t + i] : 0;
    Row row = {.bias = a->bias[at], .low = (first > 0 ? first : 0) - a->col0, .high = i + 1 - a->col0};
    if (row.low < 0) row.low = 0;
    if (row.high > a->cols) row.high = a->cols;
    if (row.low >= row.high) row.low = row.high = 0;
    row.from = row.low / W * W, row.to = round_up(row.high, W);
    row.reach = 1 + a->slope * (float)(i - a->col0 - row.from);
    row.start = scrambled((uint32_t)i * 0x9E3779B1u + a->keys[2 * at]);
    row.second = scrambled(row.start ^ a->keys[2 * at + 1]);
    /* a score this low weighs 0 and has a closed gate */
    for (int64_t j = row.from; j < row.low; j++) s[j] = -1e30f;
    for (int64_t j = row.high; j < row.to; j++) s[j] = -1e30f;
    return row;
}

static inline void aim(Row *row, float top) {
    float x = -(top + row->bias);
    row->top = top;
    row->c = exp_of(all(x < 80.0f ? x : 80.0f))[0];
}

static inline int is_wide(const Row *row) { return row->top + row->bias > HIGH; }

static inline float largest(const float *s, int64_t from, int64_t to) {
    vec most = all(-1e30f);
    for (int64_t j = from; j < to; j += W) {
        vec x = load(s + j);
        most = pick(x > most, x, most);
    }
    return highest(most);
}

static inline void clear_outside(const Row *row, float *s, int64_t cols) {
    memset(s, 0, row->from * 4);
    memset(s + row->to, 0, (cols - row->to) * 4);
}

typedef struct {
    float held, closed, expected; /* sums of exp(S - max) over open and closed edges, and of their chances */
    uint32_t words;
    int32_t opened;
} Sums;

static inline __attribute__((always_inline)) Sums weigh(const Tile *a, const Row *row, float *s, int mode, int wide) {
    vec held = {}, closed = {}, expected = {};
    uvec total = {}, column = (lanes() + (uint32_t)(a->col0 + row->from)) * 0xC2B2AE3Du;
    ivec opened = {};
    vec reach = ramp(row->reach, -a->slope);
    for (int64_t j = row->from; j < row->to; j += W) {
        vec x = load(s + j), p = exp_of(x - row->top), yes, no;
        odds(row, x, p, wide, &yes, &no);
        vec whole = yes + no, chance = yes * (1.0f / whole);
        expected += chance * reach;
        reach -= a->slope * W;
        if (mode == OPEN) {
            held += p;
            store(s + j, p);
            if (a->words) {
                uvec inside = (uvec)(x > all(-1e29f));
                total += words(row, column) & inside;
                column += (uint32_t)W * 0xC2B2AE3Du;
            }
            continue;
        }
        uvec word = mode == SAMPLED || a->words ? words(row, column) : (uvec){};
        column += (uint32_t)W * 0xC2B2AE3Du;
        ivec open = is_open(row, x, yes, whole, word, mode);
        if (a->words) total += word & (uvec)open;
        vec kept = (vec)(open & (ivec)p);
        opened -= open;
        held += kept;
        closed += (vec)(~open & (ivec)p);
        store(s + j, kept);
    }
    int32_t n = mode == OPEN ? (int32_t)(row->high - row->low) : isum(opened);
    return (Sums){sum(held), sum(closed), sum(expected), (uint32_t)isum((ivec)total), n};
}

int64_t gated_forward(const Tile *a, float *scores) {
    int64_t opened = 0;
#pragma omp parallel for collapse(2) schedule(static) reduction(+ : opened) num_threads(a->threads) if (a->threads > 1)
    for (int64_t head = 0; head < a->heads * a->reps; head++)
        for (int64_t r = 0; r < a->rows; r++) {
            float *s = scores + (head * a->rows + r) * a->cols;
            int64_t at = place(a, head, r);
            Row row = begin(a, head, r, s);
            clear_outside(&row, s, a->cols);
            float sunk = a->sink ? a->sink[a->head0 * a->reps + head] : -INFINITY;
            if (row.low == row.high) {
                a->top[at] = a->norm[at] = a->expected[at] = a->leak[at] = 0;
                a->lse[at] = sunk, a->opened[at] = 0;
                if (a->words) a->words[at] = 0;
                continue;
            }
            aim(&row, largest(s, row.from, row.to));
            Sums sums = {};
#define FOR(mode, wide) \
    case mode * 2 + wide: sums = weigh(a, &row, s, mode, wide); break
            switch (a->mode * 2 + is_wide(&row)) {
                FOR(SAMPLED, 0);
                FOR(SAMPLED, 1);
                FOR(HARD, 0);
                FOR(HARD, 1);
                FOR(OPEN, 0);
                FOR(OPEN, 1);
            }
#undef FOR
            float whole = sums.held + sums.closed, peak = row.top;
            if (a->sink) {
                peak = sums.held > 0 && row.top > sunk ? row.top : sunk;
                whole = expf(sunk - peak) + (sums.held > 0 ? sums.held * expf(row.top - peak) : 0);
            }
            a->lse[at] = peak + logf(whole);
            /* with a sink and only closed edges, exp(max) / Z may be anything */
            a->norm[at] = expf(fminf(row.top - peak, 80.0f)) / whole;
            a->top[at] = row.top, a->expected[at] = sums.expected;
            a->opened[at] = sums.opened, a->leak[at] = a->sink ? 0 : sums.closed / whole;
            if (a->words) a->words[at] = sums.words;
            opened += sums.opened;
        }
    return opened;
}

static inline __attribute__((always_inline)) float differentiate(const Tile *a, const Row *row, int64_t at, float *s,
                                                                 float *d, int mode, int wide, uint32_t *checksum) {
    const int noisy = mode == SAMPLED && !a->exact, sunk = a->sink != NULL;
    const float norm = a->norm[at], delta = a->delta[at], price = a->price[at];
    vec dbias = {};
    uvec total = {}, column = (lanes() + (uint32_t)(a->col0 + row->from)) * 0xC2B2AE3Du;
    vec reach = ramp(row->reach, -a->slope) * price;
    float step = a->slope * W * price;
    for (int64_t j = row->from; j < row->to; j += W) {
        vec x = load(s + j), g = load(d + j), p = exp_of(x - row->top), yes, no;
        odds(row, x, p, wide, &yes, &no);
        vec whole = yes + no, inverse = 1.0f / whole, bell = (yes * inverse) * (no * inverse);
        vec gate = reach * bell;
        reach -= step;
        vec share = p * norm;
        if (sunk) {
            share = pick(share > all(1.0f), all(1.0f), share);
            g -= delta;
        }
        uvec word = mode == SAMPLED || a->words ? words(row, column) : (uvec){};
        column += (uint32_t)W * 0xC2B2AE3Du;
        ivec open = mode == OPEN ? (ivec)(x > all(-1e29f)) : is_open(row, x, yes, whole, word, mode);
        if (a->words) total += word & (uvec)open;
        vec pull = share * g;
        if (mode != OPEN) {
            vec soft = bell;
            if (noisy) {
                vec u = uniform(word), up = yes * (1.0f - u), down = no * u, both = 1.0f / (up + down);
                soft = (up * both) * (down * both);
            }
            gate += pull * soft;
            dbias += gate;
        } else {
            dbias += gate;
        }
        vec slide = mode == OPEN ? pull : (vec)(open & (ivec)pull);
        store(s + j, mode == OPEN ? share : (vec)(open & (ivec)share));
        store(d + j, sunk ? slide + gate : slide - share * delta + gate);
    }
    *checksum = (uint32_t)isum((ivec)total);
    return sum(dbias);
}

void gated_backward(const Tile *a, float *scores, float *gradients) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(a->threads) if (a->threads > 1)
    for (int64_t head = 0; head < a->heads * a->reps; head++)
        for (int64_t r = 0; r < a->rows; r++) {
            float *s = scores + (head * a->rows + r) * a->cols, *d = gradients + (head * a->rows + r) * a->cols;
            int64_t at = place(a, head, r);
            Row row = begin(a, head, r, s);
            clear_outside(&row, s, a->cols);
            clear_outside(&row, d, a->cols);
            aim(&row, a->top[at]);
            uint32_t checksum = 0;
#define FOR(mode, wide) \
    case mode * 2 + wide: a->dbias[at] = differentiate(a, &row, at, s, d, mode, wide, &checksum); break
            switch (a->mode * 2 + is_wide(&row)) {
                FOR(SAMPLED, 0);
                FOR(SAMPLED, 1);
                FOR(HARD, 0);
                FOR(HARD, 1);
                FOR(OPEN, 0);
                FOR(OPEN, 1);
            }
#undef FOR
            if (a->words) a->words[at] = checksum;
        }
}

/* Is any of n weights, a multiple of 16, not zero? None is -0, so one that is not zero has a bit. */
static inline __attribute__((always_inline)) int some(const float *w, int64_t n) {
    ivec bits = {};
    for (int64_t i = 0; i < n; i += W) bits |= (ivec)load(w + i);
    uint64_t parts[W / 2], all = 0;
    memcpy(parts, &bits, sizeof bits);
    for (int i = 0; i < W / 2; i++) all |= parts[i];
    return all != 0;
}

static inline void add(float *to, float x, const float *row, int64_t width) {
    int64_t l = 0;
    for (; l + W <= width; l += W) store(to + l, load(to + l) + x * load(row + l));
    for (; l < width; l++) to[l] += x * row[l];
}

/* v [b * g, keys, width] and out [b * h, t, width] are whole; a row of nothing but closed edges reads no weight */
void gated_gather(const Tile *a, const float *weights, const float *v, float *out, int64_t keys, int64_t width) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(a->threads) if (a->threads > 1)
    for (int64_t head = 0; head < a->heads * a->reps; head++)
        for (int64_t r = 0; r < a->rows; r++) {
            const float *w = weights + (head * a->rows + r) * a->cols;
            const float *values = v + ((a->head0 + head / a->reps) * keys + a->col0) * width;
            int64_t at = place(a, head, r), end = a->opened[at] ? a->row0 + r + 1 - a->col0 : 0;
            float *mixed = out + at * width, norm = a->norm[at];
            memset(mixed, 0, width * 4);
            for (int64_t j = 0; j < end; j += 16) {
                if (j % 64 == 0 && j + 64 <= a->cols && !some(w + j, 64)) {
                    j += 48;
                    continue;
                }
                if (!some(w + j, 16)) continue;
                int64_t found[16], n = 0;
                for (int i = 0; i < 16; i++) found[n] = j + i, n += w[j + i] != 0;
                for (int i = 0; i < n; i++) add(mixed, w[found[i]] * norm, values + found[i] * width, width);
            }
        }
}

void gated_settle(const Tile *a, const float *mixed, float *out, int64_t width) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(a->threads) if (a->threads > 1)
    for (int64_t head = 0; head < a->heads * a->reps; head++)
        for (int64_t r = 0; r < a->rows; r++) {
            int64_t at = place(a, head, r);
            const float *from = mixed + (head * a->rows + r) * width, norm = a->norm[at];
            float *to = out + at * width;
            for (int64_t l = 0; l < width; l++) to[l] = from[l] * norm;
        }
}

void gated_turn(const float *x, int64_t n, int64_t rows, int64_t cols, float *out, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < n; i++) transpose(x + i * rows * cols, rows, cols, cols, out + i * rows * cols, rows);
}
