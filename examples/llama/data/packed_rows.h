// Documents packed into rows.
#ifndef EXAMPLES_LLAMA_DATA_PACKED_ROWS_H_
#define EXAMPLES_LLAMA_DATA_PACKED_ROWS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/llama/data/permutation.h"
#include "examples/llama/data/row_source.h"
#include "examples/llama/data/token_file.h"

namespace llama {

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

#endif  // EXAMPLES_LLAMA_DATA_PACKED_ROWS_H_
