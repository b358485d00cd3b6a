// SPDX-License-Identifier: MIT
// Golden runs: each case trains a few steps, and the bits of its losses, gradient norms and final weights are
// hashed and compared with a committed file. Whoever moves or renames code must not move them. A change that
// is meant to move them is a commit of its own that says why, with the file written again:
//   FP8FLOW_GOLDEN=write build/cpu/tests/golden_reference_test
// The bits depend neither on the number of OpenMP threads nor on the machine, as long as its C library rounds
// exp, log, sin, cos and pow alike (glibc 2.36 was used).
#pragma once

#include "model/job/backend.h"
#include "tests/golden/cases.h"

#include <string>
#include <vector>

namespace fp8flow::golden {

// The results of a case, each as 16 hexadecimal digits.
struct Hashes {
    double last_loss = 0;  // for a reader: which way a change went
    std::string losses;    // of all steps: language model, balancing, z
    std::string norms;     // of the gradients, all steps
    std::string weights;   // masters of the whole model and expert biases, after the last step

    bool operator==(const Hashes& other) const {
        return losses == other.losses && norms == other.norms && weights == other.weights;
    }
};

constexpr int64_t kSteps = 2;  // of the runs in the files

// Called by all ranks of `world`, which has c.ranks; every rank gets the same. `note`: how rows travel
// (Trainer::exchange_note).
Hashes run_case(const Case& c, ProcessGroup& world, const BackendChoice& backend, std::string* note = nullptr,
                int64_t steps = kSteps);
// All cases on the reference backend, in the order of all_cases(): ranks are threads of this process, and two
// cases run at a time.
std::vector<Hashes> run_all_on_threads();

struct Row {
    Case c;
    Hashes hashes;
};

// A golden file: one row a case.
class File {
public:
    explicit File(std::string path) : path_(std::move(path)) {}
    // Throws Error(data) where the file cannot be understood. False where there is none.
    bool read();
    void write() const;  // in the order of all_cases()

    const std::string& path() const { return path_; }
    const std::vector<Row>& rows() const { return rows_; }
    const Hashes* find(const Case& c) const;
    void put(const Case& c, const Hashes& hashes);
    // Without rows of cases that all_cases() no longer has.
    void drop_unknown();

private:
    std::string path_;
    std::vector<Row> rows_;
};

// "" where both are equal; otherwise which of losses, gradient norms and weights changed, and the last loss
// of both.
std::string difference(const Hashes& got, const Hashes& wanted);

// FP8FLOW_GOLDEN=write: the test writes the file instead of comparing with it. FP8FLOW_GOLDEN=require: hashes
// of GPUs that have not been taken yet are a failure; otherwise that test is skipped.
bool writing();
bool required();

}  // namespace fp8flow::golden
