// A mixture's experts: the routing of rows, and the gated networks that the routed rows pass through.

#pragma once

#include <numeric>

#include "linear.h"
#include "ops.h"

enum Activation : int64_t { ACTIVATION_SILU, ACTIVATION_GELU };

// Calls work(begin, end) for rows, a few at a time; a little work stays with the caller.
template <class F>
void over_rows(Pool& pool, int64_t rows, int64_t width, F&& work) {
    const int64_t step = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width));
    pool.run((rows + step - 1) / step, [&](int, int64_t chunk) {
        work(chunk * step, std::min(rows, (chunk + 1) * step));
    });
}

// gate_up (rows, 2 * width) to activation(gate) * up (rows, width).
inline void gated_rows(int64_t activation, const float* gate_up, int64_t stride, int64_t rows, int64_t width, float* out,
                       int64_t out_stride, Pool& pool) {
    over_rows(pool, rows, 2 * width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* row = gate_up + r * stride;
            if (activation == ACTIVATION_GELU)
                gated<Gelu>(row, row + width, width, out + r * out_stride);
            else
                gated<Silu>(row, row + width, width, out + r * out_stride);
        }
    });
}

inline void norm_rows(const float* x, int64_t stride, int64_t rows, const float* weight, int64_t width, float eps,
                      float* out, int64_t out_stride, Pool& pool) {
    over_rows(pool, rows, width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) rms_norm(x + r * stride, weight, width, eps, out + r * out_stride);
    });
}

struct Network {  // down(activation(gate) * up)
    const Matrix* gate_up;
    const Matrix* down;
    int64_t activation;
};

// ``rows`` rows through a network, in blocks, so that what lies between stays in the cache.
inline void pass_network(const Network& network, const float* x, int64_t x_stride, int64_t rows, float* out,
                         int64_t out_stride, Pool& pool) {
    static Scratch scratch;
    const int64_t width = network.down->n_in, most = std::min<int64_t>(rows, ROW_BLOCK);
    float* gate_up = scratch.take(most * 3 * width);
    float* hidden = gate_up + most * 2 * width;
    for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
        const int64_t count = std::min<int64_t>(ROW_BLOCK, rows - row);
        linear(*network.gate_up, x + row * x_stride, count, x_stride, gate_up, 2 * width, pool);
        gated_rows(network.activation, gate_up, 2 * width, count, width, hidden, width, pool);
        linear(*network.down, hidden, count, width, out + row * out_stride, out_stride, pool);
    }
}

// What the experts ``ids`` (P,) answer to the rows ``row_idx`` (P,) of x: (P, n_embd), expert by expert.
inline void expert_outputs(const Network* experts, const float* x, int64_t x_stride, const int64_t* row_idx,
                           const int64_t* ids, int64_t pairs, float* out, Pool& pool) {
    static Scratch scratch;
    static std::vector<int64_t> order;
    order.resize(size_t(pairs));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    for (int64_t begin = 0, end; begin < pairs; begin = end) {
        const int64_t id = ids[order[size_t(begin)]];
        for (end = begin; end < pairs && ids[order[size_t(end)]] == id;) ++end;
        const Network& network = experts[id];
        const int64_t count = end - begin, width = network.gate_up->n_in, n_out = network.down->n_out;
        float* rows = scratch.take(count * (width + n_out));
        float* answers = rows + count * width;
        for (int64_t i = 0; i < count; ++i)
            std::copy_n(x + row_idx[order[size_t(begin + i)]] * x_stride, width, rows + i * width);
        pass_network(network, rows, width, count, answers, n_out, pool);
        for (int64_t i = 0; i < count; ++i)
            std::copy_n(answers + i * n_out, n_out, out + order[size_t(begin + i)] * n_out);
    }
}

// To each row, its pairs' terms times their weights, added to zero in the order of the pairs, each step rounded.
inline void weighted_sum(const float* terms, const int64_t* row_idx, const float* weights, int64_t pairs, int64_t width,
                         int64_t rows, float* out, int64_t out_stride, Pool& pool) {
    const int64_t step = pairs * width < 65536 ? width : (width + 4 * pool.count() - 1) / (4 * pool.count());
    pool.run((width + step - 1) / step, [&](int, int64_t chunk) {
        const int64_t begin = chunk * step, end = std::min(width, begin + step);
        for (int64_t r = 0; r < rows; ++r) std::fill(out + r * out_stride + begin, out + r * out_stride + end, 0.0f);
        for (int64_t p = 0; p < pairs; ++p) {
            float* place = out + row_idx[p] * out_stride;
            const float* term = terms + p * width;
            const float weight = weights[p];
            for (int64_t i = begin; i < end; ++i) place[i] = place[i] + weight * term[i];
        }
    });
}

// The ``used`` most probable of ``n`` experts, the lowest id first among equals, and their probabilities: divided by
// their sum, added one by one, if ``normalised``; times ``scale``.
inline void route_row(const float* logits, int64_t n, int64_t used, bool normalised, float scale, int64_t* ids,
                      float* weights) {
    static thread_local std::vector<float> p;
    static thread_local std::vector<int64_t> order;
    p.assign(size_t((n + LANES - 1) / LANES * LANES), -INFINITE);
    std::copy_n(logits, n, p.begin());
    float most = -INFINITE;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, logits[i]);
    V sum = zero();
    over_vectors(n, [&](int64_t at, int lanes) {
        put(p.data() + at, exponential(sub(take(p.data() + at, lanes), splat(most))), lanes);
        sum = add(sum, take(p.data() + at, lanes));  // lanes beyond are read as zero
    });
    const float total = sum_lanes(sum);
    for (int64_t i = 0; i < n; ++i) p[size_t(i)] = p[size_t(i)] / total;
    order.resize(size_t(n));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + used, order.end(), [&](int64_t a, int64_t b) {
        const float x = p[size_t(a)], y = p[size_t(b)];
        return x > y || (x == y && a < b) || (y != y && (x == x || a < b));  // NaN last, so that the order is one
    });
    float chosen = 0;
    for (int64_t k = 0; k < used; ++k) chosen = chosen + p[size_t(order[size_t(k)])];
    for (int64_t k = 0; k < used; ++k) {
        const float weight = p[size_t(order[size_t(k)])];
        ids[k] = order[size_t(k)];
        weights[k] = (normalised ? weight / chosen : weight) * scale;
    }
}
