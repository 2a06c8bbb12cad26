// A file of tokens as one stream, cut into windows.
#ifndef EXAMPLES_LLAMA_DATA_WINDOW_ROWS_H_
#define EXAMPLES_LLAMA_DATA_WINDOW_ROWS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/llama/data/token_file.h"

// Rows of tokens to train on or to measure with.

namespace llama {

// The target where there is nothing to predict: what LibTorch's losses ignore.
inline constexpr int64_t kNoTarget = -100;
// The token where there is none; its target is kNoTarget.
inline constexpr int64_t kPadding = 0;

// One row, filled by its source.
struct Row {
  absl::Span<int64_t> tokens;   // seq of them
  absl::Span<int64_t> targets;  // as many: the token that follows, or kNoTarget
  // Where documents begin in it, ascending from 0; empty: nobody says.
  std::vector<int64_t> documents;
};

// A data set cut into rows of equal length, the same on all ranks. Every row
// has a target. Thread-safe.
class RowSource {
 public:
  virtual ~RowSource() = default;

  virtual int64_t seq() const = 0;
  virtual int64_t num_rows() const = 0;  // at least 1
  // `index` in [0, num_rows()); `row.documents` is empty before. Errors are
  // those of TokenFile.
  virtual absl::Status Read(int64_t index, Row& row) const = 0;
};

// What is left over where no whole window fits any more.
enum class LastWindow {
  kLeftOut,  // up to seq tokens are no target
  kPadded,
};

// Row i has the tokens from i * seq on, and one more as the last target, so
// that every token but the first is a target once.
class WindowRows final : public RowSource {
 public:
  // InvalidArgument: seq < 1, or too few tokens for one row.
  static absl::StatusOr<std::shared_ptr<const WindowRows>> Create(
      TokenFile file, int64_t seq, LastWindow last);

  int64_t seq() const override { return seq_; }
  int64_t num_rows() const override { return num_rows_; }
  absl::Status Read(int64_t index, Row& row) const override;

 private:
  WindowRows(TokenFile file, int64_t seq, int64_t num_rows);

  const TokenFile file_;
  const int64_t seq_;
  const int64_t num_rows_;
};

// Random orders that take no memory.

// A number that depends on both in no visible way.
uint64_t MixSeeds(uint64_t seed, uint64_t number);

// A permutation of [0, size) that a seed has chosen, and nothing else, on every
// machine: a Feistel network over the next power of four, walked along until it
// is back in the range (J. Black, P. Rogaway: Ciphers with Arbitrary Finite
// Domains, CT-RSA 2002). A place takes less than four steps on average.
// Checkpoints rely on it: another order is a change of format.
class Permutation {
 public:
  // 1 <= size <= 2^62.
  Permutation(int64_t size, uint64_t seed);

  // What is in `place` of [0, size).
  int64_t operator()(int64_t place) const;

 private:
  static constexpr int kRounds = 8;

  uint64_t Encrypt(uint64_t value) const;

  const int64_t size_;
  int half_bits_ = 1;
  std::array<uint64_t, kRounds> keys_;
};

// Documents packed into rows.

// Rows of whole documents, which a seed has shuffled: each goes into the open
// row if it fits, else begins the next one, and what is left of a row is
// padding. One that is longer than a row is cut into pieces of a row and the
// rest, which are documents in their rows, except that a piece's last target is
// the token that the next one begins with. The last token of a document has no
// target; a piece of it alone, and so a document of one token, is left out.
//
// To create it takes some 0.3 us for each document of the file, on every rank,
// and 16 bytes for each row; to read a row, as much for each document in it.
class PackedRows final : public RowSource {
 public:
  // InvalidArgument: seq < 1, or no document of two tokens. DataLoss: where
  // documents begin is damaged.
  static absl::StatusOr<std::shared_ptr<const PackedRows>> Create(
      TokenFile file, int64_t seq, uint64_t seed);

  int64_t seq() const override { return seq_; }
  int64_t num_rows() const override {
    return static_cast<int64_t>(begins_.size());
  }
  absl::Status Read(int64_t index, Row& row) const override;

 private:
  // A piece of a document, or the end of all.
  struct Place {
    int64_t document = 0;  // in the order of packing
    int64_t offset = 0;    // of its tokens

    friend bool operator==(const Place& a, const Place& b) {
      return a.document == b.document && a.offset == b.offset;
    }
  };

  PackedRows(TokenFile file, int64_t seq, uint64_t seed);

  absl::Status Pack();
  // How long the piece at `offset` is; 0: the document has no more.
  int64_t PieceSize(const TokenRange& document, int64_t offset) const;
  absl::Status ReadPiece(const TokenRange& document, int64_t offset,
                         absl::Span<int64_t> tokens,
                         absl::Span<int64_t> targets) const;

  const TokenFile file_;
  const int64_t seq_;
  const Permutation order_;
  std::vector<Place> begins_;  // of rows
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_WINDOW_ROWS_H_
