// A decoder layer's operations on few tokens, in float32, for CPUs.
//
// A product of few tokens takes about as long as its weights take to arrive from memory. Each weight is read once for
// all tokens, in the checkpoint's own layout. A token's result does not depend on the other tokens of a call.
// Matrices are row-major and contiguous, unless a stride is given.

#include <math.h>

#if defined(__AVX512F__)
enum { LANES = 16, COLUMNS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, COLUMNS = 2 };
#else
enum { LANES = 4, COLUMNS = 4 };
#endif
enum { TOKENS = 6, TILE = 64 };
// With AVX, the sums of TOKENS tokens and COLUMNS columns (or vectors of columns) stay in registers. The values of TILE
// slots stay in the first cache.

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef int fours __attribute__((vector_size(16)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 6")
#define CALL_WITH_TOKENS(count, call) \
    switch (count) { \
        case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; \
        case 4: call(4); break; case 5: call(5); break; case 6: call(6); break; \
    }

INLINE long smaller(long a, long b) { return a < b ? a : b; }
// Where thread `part` of `parts` starts in `items`
INLINE long share(long items, int part, int parts) { return items * part / parts; }

// Four numbers with the sum of x
INLINE quad partial_sums(lanes x) {
    union { lanes all; quad quads[LANES / 4]; } parts = {x};
    for (int half = LANES / 8; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) parts.quads[i] += parts.quads[i + half];
    return parts.quads[0];
}

INLINE quad add_neighbors(quad a, quad b) {  // a0 + a2, b0 + b2, a1 + a3, b1 + b3
    return __builtin_shuffle(a, b, (fours){0, 4, 1, 5}) + __builtin_shuffle(a, b, (fours){2, 6, 3, 7});
}

// y[c] = sum of x[c] for a constant number of vectors
INLINE void store_sums(const lanes *x, float *y, int count) {
    if (count == 4) {
        quad a = add_neighbors(partial_sums(x[0]), partial_sums(x[1]));
        quad b = add_neighbors(partial_sums(x[2]), partial_sums(x[3]));
        quad all = __builtin_shuffle(a, b, (fours){0, 1, 4, 5}) + __builtin_shuffle(a, b, (fours){2, 3, 6, 7});
        UNROLL for (int c = 0; c < 4; c++) y[c] = all[c];
        return;
    }
    UNROLL for (int c = 0; c < count; c++) {
        quad parts = partial_sums(x[c]);
        y[c] = (parts[0] + parts[2]) + (parts[1] + parts[3]);
    }
}

static __attribute__((noinline)) float dot(const float *x, const float *w, long size) {
    float total = 0;
    for (long i = 0; i < size; i++) total += x[i] * w[i];
    return total;
}

// y[t, c] = x[t] . w[c]. The numbers of tokens, columns and fetches are constants, so the loops over them unroll.
// Each vector of inputs also prefetches `fetches` vectors, the first at `ahead`.
INLINE void block(const float *x, const float *w, float *y, long in, long out, const float *ahead, int tokens,
                  int columns, int fetches) {
    lanes sums[TOKENS][COLUMNS];
    UNROLL for (int t = 0; t < tokens; t++)
        UNROLL for (int c = 0; c < columns; c++) sums[t][c] = (lanes){0};

    long whole = in - in % LANES;
    for (long i = 0; i < whole; i += LANES) {
        lanes weights[COLUMNS];
        UNROLL for (int c = 0; c < columns; c++) weights[c] = *(const lanes *)(w + c * in + i);
        UNROLL for (int f = 0; f < fetches; f++, ahead += LANES) __builtin_prefetch(ahead, 0, 2);
        UNROLL for (int t = 0; t < tokens; t++) {
            lanes inputs = *(const lanes *)(x + t * in + i);
            UNROLL for (int c = 0; c < columns; c++) sums[t][c] += inputs * weights[c];
        }
    }
    UNROLL for (int t = 0; t < tokens; t++) store_sums(sums[t], y + t * out, columns);
    if (whole < in)
        for (int t = 0; t < tokens; t++)
            for (int c = 0; c < columns; c++)
                y[t * out + c] += dot(x + t * in + whole, w + c * in + whole, in - whole);
}

// The same for any number of tokens, in steps of up to TOKENS. Each step fetches its share of the next block.
INLINE void blocks(const float *x, const float *w, float *y, long tokens, long in, long out, int columns) {
    long steps = (tokens + TOKENS - 1) / TOKENS, step = (tokens + steps - 1) / steps;
    int half = (columns + 1) / 2;
    const float *next = w + columns * in;
    #define ALL_AT_ONCE(n) block(x, w, y, in, out, next, n, columns, columns)
    #define IN_STEPS(n) \
        block(x + t * in, w, y + t * out, in, out, next + t / step * half * (in - in % LANES), n, columns, half)
    if (steps == 1)
        CALL_WITH_TOKENS(tokens, ALL_AT_ONCE)
    else
        for (long t = 0; t < tokens; t += step) CALL_WITH_TOKENS(smaller(tokens - t, step), IN_STEPS)
}

// Columns from ... to - 1 of y [tokens, out] = x [tokens, in] @ w [out, in].T
static void columns(const float *x, const float *w, float *y, long tokens, long in, long out, long from, long to) {
    if (!tokens) return;
    long c = from;
    for (; c + COLUMNS <= to; c += COLUMNS) blocks(x, w + c * in, y + c, tokens, in, out, COLUMNS);
    for (; c < to; c++) blocks(x, w + c * in, y + c, tokens, in, out, 1);
}

// y = x @ w.T + bias, or with `added` [tokens, out], which it overwrites: y += x @ w.T. bias may be NULL.
void product(const float *x, const float *w, const float *bias, float *y, float *added, long tokens, long in, long out,
             int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        long from = share(out, part, threads), to = share(out, part + 1, threads);
        columns(x, w, added ? added : y, tokens, in, out, from, to);
        for (long t = 0; t < tokens; t++) {
            const float *more = added ? added + t * out : bias;
            if (more) for (long c = from; c < to; c++) y[t * out + c] += more[c];
        }
    }
}

// exp(x) with a relative error below 3e-7 up to 88. A loop over it becomes vector instructions.
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 89 ? 89 : x;  // exp(89) is inf, and NaN passes
    float n = rintf(x * 1.44269504f), r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // x - n log 2
    float series = 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    union { int bits; float value; } power = {((int)n + 127) << 23};
    return series * power.value;
}

// y [tokens, out] = silu(x @ gate.T) * (x @ up.T), with gate and up in w [2 * out, in]; scratch [tokens, 2 * out]
void gated_product(const float *x, const float *w, float *y, float *scratch, long tokens, long in, long out,
                   int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        long from = share(out, part, threads), to = share(out, part + 1, threads);
        columns(x, w, scratch, tokens, in, 2 * out, from, to);
        columns(x, w, scratch, tokens, in, 2 * out, out + from, out + to);
        for (long t = 0; t < tokens; t++) {
            const float *gate = scratch + t * 2 * out, *up = gate + out;
            for (long c = from; c < to; c++) y[t * out + c] = gate[c] / (1 + exponential(-gate[c])) * up[c];
        }
    }
}

// y = RMSNorm(x) * weight for x [rows, size]
void rms_norm(const float *x, const float *weight, float *y, long rows, long size, float eps) {
    for (long row = 0; row < rows; row++, x += size, y += size) {
        float squares;
        columns(x, x, &squares, 1, size, 1, 0, 1);
        float scale = 1 / sqrtf(squares / size + eps);
        for (long i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
    }
}

// Rotary embedding y of one head x [size] with halves (low, high)
INLINE void rotate(const float *x, float *y, const float *cos, const float *sin, long size) {
    long half = size / 2;
    for (long i = 0; i < half; i++) {
        float low = x[i], high = x[half + i];
        y[i] = low * cos[i] - high * sin[i];
        y[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

// Rotates the queries and keys of qkv [tokens, (heads + 2 * kv_heads) * size]. With q_norm, each head is normalized
// first, in place. Queries go to q [sequences, heads, nodes, size], tokens = sequences * nodes; keys and values of a
// token to keys + places[token] + head * head_stride, and nowhere if places[token] < 0.
void rotate_and_store(float *qkv, float *q, float *keys, float *values, const float *cos, const float *sin,
                      const long *positions, const long *places, const float *q_norm, const float *k_norm, float eps,
                      long tokens, long nodes, long heads, long kv_heads, long size, long head_stride) {
    for (long token = 0; token < tokens; token++) {
        float *x = qkv + token * (heads + 2 * kv_heads) * size, *k = x + heads * size, *v = k + kv_heads * size;
        const float *c = cos + positions[token] * size, *s = sin + positions[token] * size;
        if (q_norm) {
            rms_norm(x, q_norm, x, heads, size, eps);
            rms_norm(k, k_norm, k, kv_heads, size, eps);
        }
        float *own = q + (token / nodes * heads * nodes + token % nodes) * size;
        for (long head = 0; head < heads; head++) rotate(x + head * size, own + head * nodes * size, c, s, size);
        if (!kv_heads || places[token] < 0) continue;
        for (long head = 0; head < kv_heads; head++) {
            long place = places[token] + head * head_stride;
            rotate(k + head * size, keys + place, c, s, size);
            for (long i = 0; i < size; i++) values[place + i] = v[head * size + i];
        }
    }
}

// y[t] += sum over slots of p[t, slot] * v[slot], for y and v of `vectors` vectors and rows `size` apart
INLINE void weigh(const float *p, const float *v, float *y, long slots, long p_stride, long size, int tokens,
                  int vectors) {
    lanes sums[TOKENS][COLUMNS];
    UNROLL for (int t = 0; t < tokens; t++)
        UNROLL for (int c = 0; c < vectors; c++) sums[t][c] = *(const lanes *)(y + t * size + c * LANES);
    for (long slot = 0; slot < slots; slot++) {
        lanes values[COLUMNS];
        UNROLL for (int c = 0; c < vectors; c++) values[c] = *(const lanes *)(v + slot * size + c * LANES);
        UNROLL for (int t = 0; t < tokens; t++)
            UNROLL for (int c = 0; c < vectors; c++) sums[t][c] += values[c] * p[t * p_stride + slot];
    }
    UNROLL for (int t = 0; t < tokens; t++)
        UNROLL for (int c = 0; c < vectors; c++) *(lanes *)(y + t * size + c * LANES) = sums[t][c];
}

// y [tokens, size] += p [tokens, slots] @ v [slots, size], rows of p p_stride apart
static void add_values(const float *p, const float *v, float *y, long tokens, long slots, long p_stride, long size) {
    for (long t = 0; t < tokens; t += TOKENS, p += TOKENS * p_stride, y += TOKENS * size) {
        long count = smaller(tokens - t, TOKENS), d = 0;
        #define WIDE(n) weigh(p, v + d, y + d, slots, p_stride, size, n, COLUMNS)
        #define NARROW(n) weigh(p, v + d, y + d, slots, p_stride, size, n, 1)
        for (; d + COLUMNS * LANES <= size; d += COLUMNS * LANES) CALL_WITH_TOKENS(count, WIDE)
        for (; d + LANES <= size; d += LANES) CALL_WITH_TOKENS(count, NARROW)
        for (; d < size; d++)
            for (long row = 0; row < count; row++)
                for (long slot = 0; slot < slots; slot++)
                    y[row * size + d] += p[row * p_stride + slot] * v[slot * size + d];
    }
}

// Softmax of scores in place; all 0 if no score is above -inf. slots: a multiple of LANES
INLINE void softmax(float *scores, long slots, float scale) {
    float largest[LANES], totals[LANES], most = -INFINITY, total = 0;
    for (int lane = 0; lane < LANES; lane++) largest[lane] = -INFINITY, totals[lane] = 0;
    for (long i = 0; i < slots; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            largest[lane] = scores[i + lane] > largest[lane] ? scores[i + lane] : largest[lane];
    for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    for (long i = 0; i < slots; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float score = scores[i + lane];
            scores[i + lane] = score == -INFINITY ? 0 : exponential((score - most) * scale);
            totals[lane] += scores[i + lane];
        }
    for (int lane = 0; lane < LANES; lane++) total += totals[lane];
    float inverse = total == 0 ? 0 : 1 / total;
    for (long i = 0; i < slots; i++) scores[i] *= inverse;
}

// Attention of q [sequences, heads, nodes, size]: out, of the same shape. A query sees a range of slots and, of the
// `others` slots after it, those where mask [sequences, nodes, others] is 1. Without a window the range is
// 0 ... lengths[b] - 1. With one, it is a ring buffer of `window` slots, of which a query at lengths[b] + level sees the
// newest (see `DecodingAttention.window`). The heads / kv_heads * nodes queries of a KV head are split into `splits`
// parts. scratch: `scratch_size` floats per thread, for the scores of a part, each row rounded up to 16 slots.
void attention(const float *q, const float *keys, const float *values, float *out, float *scratch, const int *lengths,
               const unsigned char *mask, long sequences, long heads, long kv_heads, long nodes, long size,
               long sequence_stride, long head_stride, long others, long window, long level, long splits,
               long scratch_size, float scale, int threads) {
    long queries = heads / kv_heads * nodes, units = sequences * kv_heads * splits;
    #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; part++)
        for (long unit = share(units, part, threads); unit < share(units, part + 1, threads); unit++) {
            long pair = unit / splits, sequence = pair / kv_heads;
            long from = share(queries, unit % splits, splits);
            long count = share(queries, unit % splits + 1, splits) - from;
            long place = sequence * sequence_stride + pair % kv_heads * head_stride;
            const float *own_q = q + (pair * queries + from) * size;
            float *y = out + (pair * queries + from) * size, *scores = scratch + part * scratch_size;

            // The range, which a ring buffer can split in two, and the others
            long length = lengths[sequence], oldest = window && length + level > window ? length + level - window : 0;
            long seen = length > oldest ? length - oldest : 0, start = window ? oldest % window : 0;
            long before = window ? smaller(seen, window - start) : seen;
            long starts[] = {start, 0, window ? window : length};
            long sizes[] = {before, seen - before, others};
            long slots = seen + others, stride = (slots + LANES - 1) / LANES * LANES;

            for (long range = 0, slot = 0; range < 3; slot += sizes[range++])
                columns(own_q, keys + place + starts[range] * size, scores + slot, count, size, stride, 0,
                        sizes[range]);
            for (long row = 0; row < count; row++) {
                const unsigned char *visible = mask + (sequence * nodes + (from + row) % nodes) * others;
                for (long i = 0; i < others; i++)
                    if (!visible[i]) scores[row * stride + seen + i] = -INFINITY;
                for (long i = slots; i < stride; i++) scores[row * stride + i] = -INFINITY;
                softmax(scores + row * stride, stride, scale);
            }
            for (long i = 0; i < count * size; i++) y[i] = 0;
            for (long range = 0, slot = 0; range < 3; slot += sizes[range++])
                for (long i = 0; i < sizes[range]; i += TILE)
                    add_values(scores + slot + i, values + place + (starts[range] + i) * size, y, count,
                               smaller(sizes[range] - i, TILE), stride, size);
        }
}
