// SPDX-License-Identifier: MIT
// TensorBoard's event files: records in the TFRecord framing, each a protobuf Event, both written by hand
// because so little of them is needed. Tags are Megatron-LM's, so that runs of both share one picture.
// Read next: step_values.h.
#pragma once

#include "model/base/output.h"
#include "model/report/step_values.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::report {

// u64 length, masked CRC32C of it, the bytes, masked CRC32C of them; little endian. The mask: rotated right
// by 15, plus a282ead8.
std::string tfrecord(std::string_view bytes);

// Event {1: wall_time double, 2: step int64} with {3: file_version string} or {5: Summary {1: Value {1: tag,
// 2: simple_value float}}} or {7: SessionLog {1: status START}}: TensorBoard forgets what earlier files of
// the folder have from this step on.
std::string version_event(double wall_time);
std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value);
std::string start_event(double wall_time, int64_t step);

// The file of one run, or of one part of it.
class EventFile {
public:
    // A new file in the folder (is_event_file), of the iterations after `done`. Throws ExitCode::output. The
    // configuration must outlive this.
    EventFile(const OutputFolder& folder, const Config& config, int64_t done);

    void step(const StepValues& values);
    void evaluation(int64_t iteration, double nats);
    // Of tensor_stats_record: tensor_stats/nmse/dY_layer_3 and so on.
    void tensor_stats(int64_t iteration, const std::vector<nlohmann::json>& records);
    const std::string& path() const { return file_.path(); }

private:
    const Config& config_;
    LineFile file_;
};

}  // namespace fp8flow::report
