// SPDX-License-Identifier: MIT
// Dispatch and combine checked against a brute-force oracle: every rank makes the data of all ranks from one
// seed and computes what it must receive from the definitions alone (not from the plan). The same checks run
// over threads and over MPI.
#pragma once

#include "kernels/comm/group_exchange.h"
#include "kernels/comm/levels/hierarchical_exchange.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/plans.h"
#include "tests/support/tensors.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace fp8flow::test {

enum class Wire { plain, fp8, fp8_free_scales };
enum class Skew {
    none,
    hot_expert,
    hot_rank,
    empty_rank,
    hot_host,
    empty_host
};  // empty_rank, empty_host: nobody asks for experts of the last rank, of the last rank's host

enum class Levels { one, two };  // of exchange: GroupExchange, HierarchicalExchange

struct ExchangeCase {
    std::vector<int64_t> tokens;  // by rank
    int64_t topk = 2;
    int64_t experts = 8;
    int64_t hidden = 128;
    int64_t alignment = 16;
    DType dtype = DType::bf16;  // of combine, and of a plain dispatch
    Wire wire = Wire::plain;
    bool fixed_messages = false;  // of rows, whatever the routing: their bytes are not checked
    CombineOrder order = CombineOrder::rank;
    Skew skew = Skew::none;
    int64_t row_base = 0;
    uint64_t seed = 1;
    std::vector<int> host_of = {};  // by rank, numbered by their lowest rank; empty: all on one, not counted
    Levels levels = Levels::one;
    bool hosts_counted = true;  // the exchange counts what crosses hosts

    int host(int64_t rank) const { return host_of.empty() ? 0 : host_of[static_cast<std::size_t>(rank)]; }
    // The number of a rank among those of its host.
    int64_t place(int64_t rank) const {
        int64_t before = 0;
        for (int64_t r = 0; r < rank; ++r) before += host(r) == host(rank);
        return before;
    }
    int64_t ranks() const { return static_cast<int64_t>(tokens.size()); }
    int64_t slots() const { return *std::max_element(tokens.begin(), tokens.end()); }
    int64_t local_experts() const { return experts / ranks(); }
    // Tokens are numbered over all ranks, so that data does not depend on how they are spread.
    int64_t token(int64_t rank, int64_t t) const {
        return std::accumulate(tokens.begin(), tokens.begin() + rank, t);
    }
    std::string text() const {
        return fmt::format(
            "tokens {}, top-{} of {}, hidden {}, alignment {}, {}, wire {}, order {}, skew {}, base {}, seed "
            "{}, hosts {}, levels {}",
            fmt::join(tokens, "/"), topk, experts, hidden, alignment, name_of(dtype), static_cast<int>(wire),
            static_cast<int>(order), static_cast<int>(skew), row_base, seed, fmt::join(host_of, "/"),
            static_cast<int>(levels) + 1);
    }
};

inline uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ (b + 0x9E3779B97F4A7C15ull + (a << 6) + (a >> 2))) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
// Experts, shapes and dtypes of a case at random; draw(n): a number below n.
template <class Draw> void draw_shapes(ExchangeCase& c, Draw& draw) {
    c.experts = c.ranks() * (1 + draw(4));
    c.topk = 1 + draw(c.experts);
    c.wire = static_cast<Wire>(draw(3));
    c.hidden = c.wire == Wire::plain ? 1 + draw(40) : 128;
    c.alignment = int64_t{1} << draw(6);
    c.dtype = draw(2) == 0 ? DType::bf16 : DType::f32;
    c.order = draw(2) == 0 ? CombineOrder::rank : CombineOrder::invariant;
}

// Numbers of different size, so that a sum in another order rounds differently.
inline float value(uint64_t stream, int64_t token, int64_t expert, int64_t h) {
    const uint64_t bits =
        mix(mix(stream, static_cast<uint64_t>(token)), static_cast<uint64_t>(expert * 100003 + h));
    return std::ldexp(static_cast<float>(static_cast<int64_t>(bits % 4093) - 2046),
                      -static_cast<int>(bits >> 60));
}

// The experts of every token: the topk of a random order in which hot experts come first and unwanted ones
// last.
inline Routing make_routing(const ExchangeCase& c) {
    Routing routing(c.ranks(), c.slots(), c.topk, c.experts);
    std::vector<int64_t> order(static_cast<std::size_t>(c.experts));
    for (int64_t g = 0; g < c.ranks(); ++g) {
        for (int64_t t = 0; t < c.tokens[static_cast<std::size_t>(g)]; ++t) {
            const auto key = [&](int64_t e) {
                const bool last_rank = e / c.local_experts() == c.ranks() - 1,
                           last_host = c.host(e / c.local_experts()) == c.host(c.ranks() - 1);
                if ((c.skew == Skew::hot_expert && e == 0) || (c.skew == Skew::hot_rank && last_rank) ||
                    (c.skew == Skew::hot_host && last_host))
                    return uint64_t{0};
                if ((c.skew == Skew::empty_rank && last_rank) || (c.skew == Skew::empty_host && last_host))
                    return ~uint64_t{0};
                return mix(mix(c.seed, static_cast<uint64_t>(c.token(g, t))), static_cast<uint64_t>(e)) | 1;
            };
            std::iota(order.begin(), order.end(), int64_t{0});
            std::sort(order.begin(), order.end(),
                      [&](int64_t a, int64_t b) { return std::pair(key(a), a) < std::pair(key(b), b); });
            for (int64_t k = 0; k < c.topk; ++k) {
                routing.id(g, t, k) = static_cast<int32_t>(order[static_cast<std::size_t>(k)]);
                routing.prob(g, t, k) = value(c.seed + 77, c.token(g, t), k, 0);
            }
        }
    }
    return routing;
}

// One MoE layer of one rank: its plan stays alive, so several layers can be under way at once.
class ExchangeLayer {
public:
    ExchangeLayer(const ExchangeCase& c, int64_t rank)
        : c_(c), rank_(rank), routing_(make_routing(c)), plan_(routing_, rank, c.alignment, -1, c.row_base) {
        for (int64_t e = rank * c.local_experts(); e < (rank + 1) * c.local_experts(); ++e) {
            for (int64_t g = 0; g < c.ranks(); ++g)
                for (int64_t t = 0; t < c.tokens[static_cast<std::size_t>(g)]; ++t)
                    if (routed(g, t, e)) rows_.push_back({g, t, e});
            while (static_cast<int64_t>(rows_.size()) % c.alignment != 0) rows_.push_back({-1, -1, -1});
        }
    }

    int64_t num_tokens() const { return c_.tokens[static_cast<std::size_t>(rank_)]; }
    DispatchPlan plan() const { return plan_of(plan_.args, num_tokens()); }

    // This rank's routing goes out, everybody's comes in.
    void gather(Exchange& exchange) const {
        HostTensor ids(DType::i32, {num_tokens(), c_.topk}), probs(DType::f32, {num_tokens(), c_.topk});
        copy(routing_.ids.view()[rank_].slice(0, num_tokens()), ids);
        copy(routing_.probs.view()[rank_].slice(0, num_tokens()), probs);
        HostTensor all_ids(DType::i32, {c_.ranks(), c_.slots(), c_.topk}),
            all_probs(DType::f32, {c_.ranks(), c_.slots(), c_.topk});
        all_ids.fill_bytes(0x11);
        const WireBytes before = exchange.wire_bytes();
        exchange.gather_routing(ids, probs, all_ids, all_probs);
        EXPECT_TRUE(same_bytes(all_ids, routing_.ids)) << c_.text();
        EXPECT_TRUE(same_bytes(all_probs, routing_.probs)) << c_.text();
        // one part of the routing for each other rank
        int64_t elsewhere = 0;
        for (int64_t g = 0; g < c_.ranks(); ++g) elsewhere += crosses(g);
        const int64_t part = c_.slots() * c_.topk * 8;
        const WireBytes now = exchange.wire_bytes();
        EXPECT_EQ(now.routing - before.routing, static_cast<double>((c_.ranks() - 1) * part));
        expect_between_hosts(before, now, elsewhere * part);
    }

    // `leg` picks the data: forward and backward of one layer differ.
    void dispatch(Exchange& exchange, Arena& scratch, uint64_t leg) const {
        const HostScaled tokens = wire_rows(leg, rank_);
        HostScaled dst = rows_tensor(), want = rows_tensor();
        const WireBytes before = exchange.wire_bytes();
        const DispatchPlan plan = this->plan();
        exchange.dispatch(tokens, plan, dst, scratch);

        for (std::size_t r = 0; r < rows_.size(); ++r)
            put_row(leg, rows_[r], want, c_.row_base + static_cast<int64_t>(r));
        EXPECT_TRUE(same_bytes(dst.data, want.data)) << c_.text() << ", leg " << leg;
        EXPECT_TRUE(c_.wire == Wire::plain || same_bytes(dst.scales, want.scales)) << c_.text();

        if (c_.fixed_messages) return;
        const Sent sent = rows_dispatched();
        const WireBytes now = exchange.wire_bytes();
        EXPECT_EQ(now.dispatch - before.dispatch, static_cast<double>(sent.all * wire_row_bytes()))
            << c_.text();
        expect_between_hosts(before, now, sent.between_hosts * wire_row_bytes());
    }

    // What this rank's experts give back in a leg. src rows of pads are poison: they must not be read.
    struct CombineInputs {
        HostTensor src, drow_prob, residual, addend;
    };
    CombineInputs combine_inputs(uint64_t leg) const {
        const int64_t rows = c_.row_base + plan_.groups.row_capacity;
        CombineInputs in{HostTensor(c_.dtype, {rows, c_.hidden}), HostTensor(DType::f32, {rows}),
                         HostTensor(c_.dtype, {num_tokens(), c_.hidden}),
                         HostTensor(c_.dtype, {num_tokens(), c_.hidden})};
        for (std::size_t r = 0; r < rows_.size(); ++r) {
            if (rows_[r].rank < 0) continue;
            const int64_t row = c_.row_base + static_cast<int64_t>(r),
                          token = c_.token(rows_[r].rank, rows_[r].token);
            for (int64_t h = 0; h < c_.hidden; ++h)
                set(in.src, row * c_.hidden + h, value(c_.seed + leg, token, rows_[r].expert, h));
            set(in.drow_prob, row, value(c_.seed + leg + 50, token, rows_[r].expert, 0));
        }
        if (c_.row_base > 0) {
            in.src.set_row_base(c_.row_base);
            in.drow_prob.set_row_base(c_.row_base);
        }
        for (int64_t i = 0; i < in.residual.numel(); ++i)
            set(in.residual, i, value(c_.seed + leg + 60, c_.token(rank_, i / c_.hidden), -1, i % c_.hidden));
        for (int64_t i = 0; i < in.addend.numel(); ++i)
            set(in.addend, i, value(c_.seed + leg + 70, c_.token(rank_, i / c_.hidden), -1, i % c_.hidden));
        return in;
    }

    // Returns y. With a residual, another tensor is added to it in half of the cases; with merging weights,
    // in half of the cases of either kind.
    HostTensor combine(Exchange& exchange, Arena& scratch, uint64_t leg, bool with_residual,
                       bool with_dprob) const {
        const int64_t tokens = num_tokens();
        const CombineInputs in = combine_inputs(leg);
        const HostTensor &src = in.src, &drow_prob = in.drow_prob, &residual = in.residual;
        const bool with_addend = with_residual && (leg / 2 + c_.seed) % 2 == 0;
        const bool with_weights = (leg / 2 + c_.seed / 2) % 2 == 0;
        HostTensor y(c_.dtype, {tokens, c_.hidden}), dprob(DType::f32, {tokens, c_.topk});
        const WireBytes before = exchange.wire_bytes();
        exchange.combine({.src = {src},
                          .row_prob = with_weights ? plan().row_prob : TensorView{},
                          .residual = with_residual ? residual.view() : TensorView{},
                          .addend = with_addend ? in.addend.view() : TensorView{},
                          .drow_prob = with_dprob ? drow_prob.view() : TensorView{},
                          .y = {y},
                          .dprob = with_dprob ? dprob.view() : TensorView{}},
                         plan(), scratch);

        HostTensor want(c_.dtype, {tokens, c_.hidden}), want_dprob(DType::f32, {tokens, c_.topk});
        const auto residual_of = [&](int64_t i) {
            if (!with_residual) return 0.0f;
            const float one = static_cast<float>(residual(i));
            if (!with_addend) return one;
            const float both = one + static_cast<float>(in.addend(i));
            return c_.dtype == DType::bf16 ? round_bf16(both) : both;
        };
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t h = 0; h < c_.hidden; ++h)
                set(want, t * c_.hidden + h,
                    combined(leg, t, h, residual_of(t * c_.hidden + h), with_weights));
            for (int64_t k = 0; k < c_.topk; ++k)
                set(want_dprob, t * c_.topk + k,
                    value(c_.seed + leg + 50, c_.token(rank_, t),
                          routing_.ids.as<int32_t>()[(rank_ * c_.slots() + t) * c_.topk + k], 0));
        }
        EXPECT_TRUE(same_bytes(y, want)) << c_.text() << ", leg " << leg << (with_weights ? ", weights" : "");
        EXPECT_TRUE(!with_dprob || same_bytes(dprob, want_dprob)) << c_.text();

        if (c_.fixed_messages) return y;
        const bool by_rank = c_.order == CombineOrder::rank;
        const Sent choices = by_rank ? values_returned() : choices_returned();
        const Sent rows = by_rank ? sums_returned() : choices;
        const int64_t row_bytes = c_.hidden * size_of(c_.dtype);
        const WireBytes now = exchange.wire_bytes();
        EXPECT_EQ(now.combine - before.combine,
                  static_cast<double>(rows.all * row_bytes + (with_dprob ? 4 * choices.all : 0)))
            << c_.text();
        expect_between_hosts(before, now,
                             rows.between_hosts * row_bytes + (with_dprob ? 4 * choices.between_hosts : 0));
        return y;
    }

    // Rows of rank `g` as they are sent.
    HostScaled wire_rows(uint64_t leg, int64_t g) const {
        const int64_t tokens = c_.tokens[static_cast<std::size_t>(g)];
        const bool plain = c_.wire == Wire::plain;
        HostScaled rows(plain ? c_.dtype : DType::e4m3, {tokens, c_.hidden},
                        plain ? ScaleLayout::none : ScaleLayout::vec128_wire, 0,
                        c_.wire == Wire::fp8 ? DType::e8m0 : DType::f32);
        for (int64_t i = 0; i < rows.data.numel(); ++i) {
            const int64_t token = c_.token(g, i / c_.hidden), h = i % c_.hidden;
            if (plain) {
                set(rows.data, i, value(c_.seed + leg, token, 0, h));
            } else {
                rows.data.view().bytes_ptr()[i] = code_of(c_.seed + leg, token, h);
            }
        }
        if (plain) return rows;
        const int64_t blocks = c_.hidden / 128;
        for (int64_t i = 0; i < tokens * blocks; ++i)
            set(rows.scales, i, scale_of(leg, c_.token(g, i / blocks), i % blocks));
        return rows;
    }
    // The M rows of this rank, poisoned, up to the end of what the plan may use.
    HostScaled rows_tensor() const {
        const int64_t rows = c_.row_base + plan_.groups.row_capacity;
        const bool plain = c_.wire == Wire::plain;
        HostScaled result(plain ? c_.dtype : DType::e4m3, {rows, c_.hidden},
                          plain ? ScaleLayout::none : ScaleLayout::vec128);
        if (c_.row_base > 0) result.set_row_base(c_.row_base);
        return result;
    }

private:
    void expect_between_hosts(const WireBytes& before, const WireBytes& now, int64_t bytes) const {
        if (!c_.hosts_counted) return;
        EXPECT_EQ(now.between_hosts - before.between_hosts, static_cast<double>(bytes)) << c_.text();
    }
    struct Row {
        int64_t rank, token, expert;  // -1: a pad
    };

    static void copy(const TensorView& from, const TensorView& to) {
        if (from.bytes() > 0) std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes()));
    }
    int32_t id(int64_t g, int64_t t, int64_t k) const {
        return routing_.ids.as<int32_t>()[(g * c_.slots() + t) * c_.topk + k];
    }
    bool routed(int64_t g, int64_t t, int64_t expert) const {
        for (int64_t k = 0; k < c_.topk; ++k)
            if (id(g, t, k) == expert) return true;
        return false;
    }
    float prob(int64_t g, int64_t t, int64_t expert) const {
        for (int64_t k = 0; k < c_.topk; ++k)
            if (id(g, t, k) == expert) return routing_.probs.as<float>()[(g * c_.slots() + t) * c_.topk + k];
        return 0.0f;
    }
    // Experts of a token on rank `host`.
    int64_t num_choices(int64_t g, int64_t t, int64_t host) const {
        int64_t n = 0;
        for (int64_t k = 0; k < c_.topk; ++k) n += id(g, t, k) / c_.local_experts() == host;
        return n;
    }
    bool crosses(int64_t g) const { return c_.host(g) != c_.host(rank_); }
    bool goes_to_host(int64_t g, int64_t t, int host) const {
        for (int64_t k = 0; k < c_.topk; ++k)
            if (c_.host(id(g, t, k) / c_.local_experts()) == host) return true;
        return false;
    }
    int64_t tokens_of(int64_t g) const { return c_.tokens[static_cast<std::size_t>(g)]; }

    // What this rank sends to others, in closed form.
    struct Sent {
        int64_t all = 0, between_hosts = 0;
        void add(int64_t count, bool crossing) {
            all += count;
            if (crossing) between_hosts += count;
        }
    };
    Sent rows_dispatched() const {
        Sent sent;
        if (c_.levels == Levels::one) {
            for (int64_t g = 0; g < c_.ranks(); ++g)
                for (int64_t t = 0; t < num_tokens(); ++t)
                    sent.add(g != rank_ && num_choices(rank_, t, g) > 0, crosses(g));
            return sent;
        }
        for (int64_t g = 0; g < c_.ranks(); ++g) {
            if (c_.place(g) != c_.place(rank_)) continue;
            // own tokens once to each other host; those of the rail on, to the other ranks of this host
            for (int64_t t = 0; t < num_tokens(); ++t)
                sent.add(crosses(g) && goes_to_host(rank_, t, c_.host(g)), true);
            for (int64_t r = 0; r < c_.ranks(); ++r)
                for (int64_t t = 0; t < tokens_of(g); ++t)
                    sent.add(r != rank_ && !crosses(r) && num_choices(g, t, r) > 0, false);
        }
        return sent;
    }
    Sent sums_returned() const {
        Sent sent;
        for (int64_t g = 0; g < c_.ranks(); ++g)
            for (int64_t t = 0; t < tokens_of(g); ++t) {
                const bool mine = num_choices(g, t, rank_) > 0;
                if (c_.levels == Levels::one) {
                    sent.add(g != rank_ && mine, crosses(g));
                } else if (c_.place(g) != c_.place(rank_)) {
                    sent.add(mine, false);  // to this host's rank on the owner's rail
                } else {
                    sent.add(crosses(g) && goes_to_host(g, t, c_.host(rank_)), true);
                }
            }
        return sent;
    }
    // Gradients of probabilities, in order `rank`: with the sums.
    Sent values_returned() const {
        if (c_.levels == Levels::one) return choices_returned();
        Sent sent;
        for (int64_t g = 0; g < c_.ranks(); ++g)
            for (int64_t t = 0; t < tokens_of(g); ++t) {
                if (c_.place(g) != c_.place(rank_)) {
                    sent.add(num_choices(g, t, rank_), false);
                } else if (crosses(g)) {
                    for (int64_t r = 0; r < c_.ranks(); ++r)
                        sent.add(crosses(r) ? 0 : num_choices(g, t, r), true);
                }
            }
        return sent;
    }
    Sent choices_returned() const {  // directly to the owner
        Sent sent;
        for (int64_t g = 0; g < c_.ranks(); ++g)
            for (int64_t t = 0; t < tokens_of(g); ++t)
                sent.add(g == rank_ ? 0 : num_choices(g, t, rank_), crosses(g));
        return sent;
    }
    int64_t wire_row_bytes() const {
        if (c_.wire == Wire::plain) return c_.hidden * size_of(c_.dtype);
        return c_.hidden + c_.hidden / 128 * (c_.wire == Wire::fp8 ? 1 : 4);
    }

    static uint8_t code_of(uint64_t stream, int64_t token, int64_t h) {
        return static_cast<uint8_t>(mix(mix(stream, static_cast<uint64_t>(token)), static_cast<uint64_t>(h)));
    }
    float scale_of(uint64_t leg, int64_t token, int64_t block) const {
        const uint64_t bits =
            mix(mix(c_.seed + leg + 30, static_cast<uint64_t>(token)), static_cast<uint64_t>(block));
        if (c_.wire == Wire::fp8) return e8m0_to_float(static_cast<uint8_t>(1 + bits % 254));
        return bits_float(static_cast<uint32_t>(bits % 0x7F000000u) + 0x00800000u);
    }
    void put_row(uint64_t leg, const Row& from, const HostScaled& rows, int64_t row) const {
        const bool pad = from.rank < 0, plain = c_.wire == Wire::plain;
        const int64_t token = pad ? 0 : c_.token(from.rank, from.token);
        for (int64_t h = 0; h < c_.hidden; ++h) {
            if (plain) {
                set(rows.data, row * c_.hidden + h, pad ? 0.0f : value(c_.seed + leg, token, 0, h));
            } else {
                rows.data.view().bytes_ptr()[row * c_.hidden + h] =
                    pad ? uint8_t{0} : code_of(c_.seed + leg, token, h);
            }
        }
        if (plain) return;
        for (int64_t b = 0; b < c_.hidden / 128; ++b)
            set(rows.scales, b * rows.scales.view().dim(1) + row, pad ? 0.0f : scale_of(leg, token, b));
    }

    // The ordering contract, for one element.
    float combined(uint64_t leg, int64_t t, int64_t h, float residual, bool weighted) const {
        const auto round = [&](float x) { return c_.dtype == DType::bf16 ? round_bf16(x) : x; };
        // sum + the row of an expert
        const auto with_row = [&](float sum, int64_t e) {
            const float x = round(value(c_.seed + leg, c_.token(rank_, t), e, h));
            return weighted ? std::fma(prob(rank_, t, e), x, sum) : sum + x;
        };
        const auto rank_sum = [&](int64_t rank) {
            float sum = 0.0f;
            for (int64_t e = rank * c_.local_experts(); e < (rank + 1) * c_.local_experts(); ++e)
                if (routed(rank_, t, e)) sum = with_row(sum, e);
            return round(sum);
        };
        float total = 0.0f;
        if (c_.order == CombineOrder::invariant) {
            for (int64_t e = 0; e < c_.experts; ++e)
                if (routed(rank_, t, e)) total = with_row(total, e);
        } else if (c_.levels == Levels::one) {
            for (int64_t rank = 0; rank < c_.ranks(); ++rank) total += rank_sum(rank);
        } else {
            for (int host = 0; host < c_.ranks(); ++host) {  // as many as there may be
                float of_host = 0.0f;
                for (int64_t rank = 0; rank < c_.ranks(); ++rank)
                    if (c_.host(rank) == host) of_host += rank_sum(rank);
                total += round(of_host);
            }
        }
        return total + residual;
    }

    ExchangeCase c_;
    int64_t rank_;
    Routing routing_;
    PlanFixture plan_;
    std::vector<Row> rows_;  // this rank's M-rows
};

// Over the levels and hosts of the case.
inline std::unique_ptr<Exchange> make_reference_exchange(ExchangeGroups groups, Ops& ops,
                                                         const ExchangeCase& c) {
    groups.hosts = HostLayout(c.host_of);
    if (c.levels == Levels::two) return make_host_levels(groups, ops, c.order);
    return std::make_unique<GroupExchange>(groups, ops, c.order);
}

// One rank's exchange with everything it needs.
struct ExchangeRank {
    ReferenceOps ops;
    Arena scratch{ops.device(), "scratch", true};
    std::unique_ptr<Exchange> made;
    Exchange& exchange = *made;

    ExchangeRank(const ExchangeGroups& groups, const ExchangeCase& c)
        : made(make_reference_exchange(groups, ops, c)) {}
    ExchangeRank(const ExchangeGroups& groups, CombineOrder order)
        : ExchangeRank(groups, ExchangeCase{.order = order}) {}
};

// Forward and backward of one layer: out, back, out again with the gradient, back again; nothing is planned
// twice.
inline void check_exchange(Exchange& exchange, Arena& scratch, const ExchangeCase& c) {
    const ExchangeLayer layer(c, exchange.rank());
    layer.gather(exchange);
    layer.dispatch(exchange, scratch, 1);
    layer.combine(exchange, scratch, 2, true, false);
    layer.dispatch(exchange, scratch, 3);
    layer.combine(exchange, scratch, 4, c.seed % 2 == 0, true);
}
inline void check_exchange(ProcessGroup& group, const ExchangeCase& c) {
    ExchangeRank self(group, c);
    check_exchange(self.exchange, self.scratch, c);
    EXPECT_EQ(self.exchange.num_dispatches(), 2);
    EXPECT_EQ(self.exchange.num_combines(), 2);
    EXPECT_EQ(self.scratch.bytes_in_use(), 0);
}

// y of every rank of threads, one after the other.
inline std::vector<uint8_t> combined(const ExchangeCase& c) {
    std::vector<std::vector<uint8_t>> of_rank(c.tokens.size());
    run_thread_ranks(static_cast<int>(c.ranks()), 60, [&](ProcessGroup& group) {
        ExchangeRank self(group, c);
        of_rank[static_cast<std::size_t>(group.rank())] =
            ExchangeLayer(c, group.rank()).combine(self.exchange, self.scratch, 1, true, true).bytes();
    });
    std::vector<uint8_t> all;
    for (const auto& bytes : of_rank) all.insert(all.end(), bytes.begin(), bytes.end());
    return all;
}

}  // namespace fp8flow::test
