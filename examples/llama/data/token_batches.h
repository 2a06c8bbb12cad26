// Cuts a file of tokens into rows, windows of a stream or packed documents, and
// these into batches for each rank, to train on and to measure with.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/llama/data/token_file.h"

namespace llama {

// The token where there is none; its target is kNoTarget.
inline constexpr int64_t kPadding = 0;

// One row, which a source fills.
struct Row {
  absl::Span<int64_t> tokens;   // seq of them
  absl::Span<int64_t> targets;  // seq of them: the next token, or kNoTarget
  // The beginnings of its documents, ascending from 0; empty: not known.
  std::vector<int64_t> documents;
};

// A data set cut into rows of equal length, the same on all ranks. Every row
// has a target. Thread-safe.
class RowSource {
 public:
  virtual ~RowSource() = default;

  virtual int64_t seq() const = 0;
  virtual int64_t num_rows() const = 0;  // at least 1
  // Reads row `index`, in [0, num_rows()); `row.documents` is empty before.
  // Errors are those of TokenFile.
  virtual absl::Status Read(int64_t index, Row& row) const = 0;
};

// The treatment of the tokens at the end that do not fill a window.
enum class LastWindow {
  kLeftOut,  // up to seq - 1 of them are no target
  kPadded,
};

// Cuts a stream into windows: row i has the tokens from i * seq on, and one
// more as the last target, so that every token but the first is a target once.
// InvalidArgument: seq < 1, there are too few tokens for one row, or not all of
// them are learned, which is for rows of documents.
absl::StatusOr<std::shared_ptr<const RowSource>> WindowRows(TokenFile file,
                                                            int64_t seq,
                                                            LastWindow last);

// Makes rows of whole documents in an order that a seed shuffles. A document
// goes into the open row if it fits, otherwise it begins the next row; the rest
// of a row is padding. A document that is longer than a row is cut into pieces
// of a row and the rest. Pieces count as documents in their rows, except that
// the last target of a piece is the first token of the next. The last token of
// a document has no target, nor has one whose next one is not learned; a piece
// or document without any target is left out.
//
// Making them takes about 0.4 us per document of the file, 1 us if not all are
// learned, on every rank, and 16 bytes per row. Reading a row takes 2 to 3 us
// per document in it.
// InvalidArgument: seq < 1, or no document has a target. DataLoss: the index
// of documents is damaged.
absl::StatusOr<std::shared_ptr<const RowSource>> PackedRows(TokenFile file,
                                                            int64_t seq,
                                                            uint64_t seed);

// Random orders that take no memory.

// Returns a number that depends on both without visible pattern.
uint64_t MixSeeds(uint64_t seed, uint64_t number);

// Returns the element in `place` of a permutation of [0, size) that depends
// only on the seed, on every machine: a Feistel network over the next power of
// four, walked along until it is back in the range (J. Black, P. Rogaway:
// Ciphers with Arbitrary Finite Domains, CT-RSA 2002), which takes less than
// four steps on average. `size` is at most 2^62. Checkpoints rely on it:
// another order changes their format.
int64_t Permuted(int64_t place, int64_t size, uint64_t seed);

struct Batch {
  at::Tensor tokens;   // int64 [rows, seq], on the CPU
  at::Tensor targets;  // likewise: the next token, or kNoTarget
  // Where documents begin, ascending indices into all tokens, row by row:
  // positions begin anew there, and no token sees another document. A row
  // without documents counts as one. Empty: no row has any.
  std::vector<int64_t> starts;
};

// Says which rows of a batch of all ranks are this rank's.
struct BatchShare {
  int64_t rows = 1;  // of all ranks
  int rank = 0;
  int world_size = 1;

  int64_t own_rows() const { return rows / world_size; }
  int64_t first_row() const { return rank * own_rows(); }
};

// Reads these rows; those past the end of the source are padding. Errors are
// those of the source.
absl::StatusOr<Batch> ReadBatch(const RowSource& source,
                                absl::Span<const int64_t> rows);

// The rows of a source without end, each once per epoch, in an order that a
// seed chooses, another one in each epoch. The next epoch begins within a
// batch, so that no row is left out. The rows of a batch do not depend on how
// many ranks share it. Thread-compatible.
class TokenBatches {
 public:
  // InvalidArgument: ranks would not get equally many rows, at least one. Ranks
  // pass the same source and seed.
  static absl::StatusOr<TokenBatches> Create(
      std::shared_ptr<const RowSource> source, const BatchShare& share,
      uint64_t seed);

  // Returns this rank's rows of the next batch: share.own_rows() rows from
  // share.first_row() on. An error, which is the source's, may be this rank's
  // alone, and leaves the position as it was.
  absl::StatusOr<Batch> Next();

  // The number of rows that batches of all ranks have had, for checkpoints. It
  // does not depend on the number of ranks and the rows of a batch.
  int64_t position() const { return position_; }
  // Sets the position, in no time. InvalidArgument: it is negative or above
  // 2^62.
  absl::Status Seek(int64_t position);

 private:
  TokenBatches(std::shared_ptr<const RowSource> source, const BatchShare& share,
               uint64_t seed)
      : source_(std::move(source)), share_(share), seed_(seed) {}

  std::shared_ptr<const RowSource> source_;
  BatchShare share_;
  uint64_t seed_;
  int64_t position_ = 0;
};

// Batches to measure with: every row of a source once, in order, in batches
// that ranks share, as TokenBatches::Create() takes it. All ranks have equally
// many batches, so that collectives match. Where rows run out there is padding,
// on some ranks nothing else; so a mean is the sum over the targets of all
// ranks, divided by their number. The rows of a batch do not depend on how many
// ranks share it. Thread-safe.
struct EvaluationBatches {
  std::shared_ptr<const RowSource> source;
  BatchShare share;

  int64_t num_batches() const;

  // Returns this rank's rows of a batch in [0, num_batches()): share.own_rows()
  // rows from share.first_row() on. Errors are the source's.
  absl::StatusOr<Batch> Read(int64_t batch) const;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
