// SPDX-License-Identifier: MIT
// The evaluation: forward passes over held-out data, two micro-batches in flight.
#include "model/job/watchdog.h"
#include "model/train/trainer.h"

#include <cmath>
#include <span>

namespace fp8flow {

using namespace data;

// As steps, micro-batches are launched one ahead, and run again if a rank ran out of rows.
double Trainer::evaluate(int64_t batches, const ReadEvaluation& read) {
    FP8FLOW_CHECK(flights_.empty(), "an evaluation with {} steps in flight", flights_.size());
    world_.set_activity(fmt::format("evaluation after step {}", next_step_));
    note_stage(Stage::evaluation, next_step_);
    if (config_.schedule.overlap_param_gather) {  // the next step would have
        ParameterStore& parameters = transformer_->parameters();
        parameters.gather_copies(*exchange_, 0, parameters.all().size(), {.stream = stream_});
    }
    const int64_t count = batches * batcher_.num_micro_batches();
    double sum = 0;  // of this rank's losses
    for (int64_t launched = 0, done = 0; done < count;) {
        while (launched < count && launched < done + kStepsInFlight) launch_evaluation(launched++, read);
        held_out_events_[done % kStepsInFlight]->wait();
        exchange_->check_peers();
        const HeldOut& result = *held_out_of(done);
        if (result.status == 0) {
            sum += f64(result.sum);
            ++done;
            continue;
        }
        for (const auto& event : held_out_events_) event->wait();
        grow_rows();
        ++evaluations_redone_;
        ops_->zero({.y = status_});
        launched = done;
    }
    world_.all_reduce_sum(std::span<double>(&sum, 1));
    require(std::isfinite(sum), ExitCode::numeric,
            "the held-out loss after step {} is not finite; lower training.lr", next_step_);
    return sum / f64(batches * tokens_of_step());
}

// Micro-batch `index` of the evaluation.
void Trainer::launch_evaluation(int64_t index, const ReadEvaluation& read) {
    note_progress();
    const int64_t micro_batches = batcher_.num_micro_batches(), micro_batch = index % micro_batches;
    const int64_t slot = index % (kStepsInFlight * micro_batches);
    fill_batch(Split::held_out, index / micro_batches, micro_batch, slot);
    ReadHead read_head;
    if (read)
        read_head = [&, first = batcher_.samples(index / micro_batches, micro_batch, world_.rank()).first](
                        const HeadChunk& chunk) { read(first, chunk); };
    const auto work = [&] {
        give_evaluation(micro_batch, slot, read_head);
        return CapturedSteps::Known{};
    };
    for (Arena* arena : arenas()) arena->join();
    if (captured_evaluations_ && !read)
        captured_evaluations_->run(to_size(slot), allocations(), stream_, work);
    else
        work();
    held_out_events_[index % kStepsInFlight]->record(stream_);
}

void Trainer::give_evaluation(int64_t micro_batch, int64_t slot, const ReadHead& read) {
    Context ctx = make_context(micro_batch, untimed_);
    const BatchFeed::Batch batch = load_batch(ctx, slot);
    ops_->zero({.y = held_out_sum_}, ctx.launch);
    transformer_->evaluate(ctx, batch.tokens, batch.labels, held_out_sum_, read);
    exchange_->all_reduce(Reduce::max, Ranks::world, status_, ctx.launch);
    HeldOut* result = held_out_of(slot);
    Device& device = ops_->device();
    device.copy_out_async(&result->status, status_.data, sizeof result->status, stream_);
    device.copy_out_async(&result->sum, held_out_sum_.data, sizeof result->sum, stream_);
}

}  // namespace fp8flow
