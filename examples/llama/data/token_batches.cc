#include "examples/llama/data/token_batches.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace llama {
namespace {

absl::Status CheckSeq(int64_t seq) {
  if (seq >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rows of ", seq, " tokens: at least 1 is needed"));
}

void Pad(int64_t begin, Row& row) {
  std::fill(row.tokens.begin() + begin, row.tokens.end(), kPadding);
  std::fill(row.targets.begin() + begin, row.targets.end(), kNoTarget);
}

// Is the output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable
// Pseudorandom Number Generators, OOPSLA 2014).
uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

class WindowRowSource final : public RowSource {
 public:
  WindowRowSource(TokenFile file, int64_t seq, int64_t num_rows)
      : file_(std::move(file)), seq_(seq), num_rows_(num_rows) {}

  int64_t seq() const override { return seq_; }
  int64_t num_rows() const override { return num_rows_; }
  absl::Status Read(int64_t index, Row& row) const override {
    FSDP_CHECK(index >= 0 && index < num_rows_);
    const int64_t begin = index * seq_;
    const int64_t count = std::min(seq_, file_.num_tokens() - 1 - begin);
    FSDP_RETURN_IF_ERROR(file_.Read(begin, row.tokens.first(count)));
    FSDP_RETURN_IF_ERROR(file_.Read(begin + 1, row.targets.first(count)));
    Pad(count, row);
    return absl::OkStatus();
  }

 private:
  const TokenFile file_;
  const int64_t seq_;
  const int64_t num_rows_;
};

class PackedRowSource final : public RowSource {
 public:
  PackedRowSource(TokenFile file, int64_t seq, uint64_t seed)
      : file_(std::move(file)), seq_(seq), seed_(seed) {}

  // Comes first.
  absl::Status Pack() {
    int64_t used = seq_;  // tokens of the open row
    return ForEachPiece({0, 0}, [&](const Piece& piece) {
      if (piece.tokens.size() > seq_ - used) {
        begins_.emplace_back(piece.document, piece.tokens.begin);
        used = 0;
      }
      used += piece.tokens.size();
      return true;
    });
  }

  int64_t seq() const override { return seq_; }
  int64_t num_rows() const override {
    return static_cast<int64_t>(begins_.size());
  }
  absl::Status Read(int64_t index, Row& row) const override;

 private:
  // A number of a document, in the order of packing, and a token of it.
  using Place = std::pair<int64_t, int64_t>;
  struct Piece {
    int64_t document = 0;
    TokenRange tokens;
    int64_t document_end = 0;
  };

  // Calls `fn` for the pieces from `first` on, until it returns false.
  absl::Status ForEachPiece(
      Place first,
      absl::FunctionRef<absl::StatusOr<bool>(const Piece& piece)> fn) const;

  const TokenFile file_;
  const int64_t seq_;
  const uint64_t seed_;
  std::vector<Place> begins_;  // of rows
};

absl::Status PackedRowSource::ForEachPiece(
    Place first,
    absl::FunctionRef<absl::StatusOr<bool>(const Piece& piece)> fn) const {
  const int64_t all = file_.num_documents();
  for (int64_t i = first.first; i < all; ++i) {
    FSDP_ASSIGN_OR_RETURN(const TokenRange document,
                          file_.Document(Permuted(i, all, seed_)));
    int64_t begin = document.begin;
    if (i == first.first) begin = std::max(begin, first.second);
    // Nothing is predicted from a last token alone.
    for (; document.end - begin >= 2; begin += seq_) {
      const int64_t end = std::min(begin + seq_, document.end);
      const TokenRange targets = {begin + 1, std::min(end + 1, document.end)};
      FSDP_ASSIGN_OR_RETURN(const bool is_learned, file_.IsLearned(targets));
      if (!is_learned) continue;
      FSDP_ASSIGN_OR_RETURN(const bool goes_on,
                            fn({i, {begin, end}, document.end}));
      if (!goes_on) return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::Status PackedRowSource::Read(int64_t index, Row& row) const {
  FSDP_CHECK(index >= 0 && index < num_rows());
  int64_t used = 0;
  const auto read = [&](const Piece& piece) -> absl::StatusOr<bool> {
    const int64_t begin = piece.tokens.begin;
    const int64_t size = piece.tokens.size();
    if (index + 1 < num_rows() &&
        begins_[index + 1] == Place(piece.document, begin)) {
      return false;
    }
    row.documents.push_back(used);
    const absl::Span<int64_t> targets = row.targets.subspan(used, size);
    const int64_t num_targets = std::min(size, piece.document_end - begin - 1);
    FSDP_RETURN_IF_ERROR(file_.Read(begin, row.tokens.subspan(used, size)));
    FSDP_RETURN_IF_ERROR(
        file_.ReadTargets(begin + 1, targets.first(num_targets)));
    std::fill(targets.begin() + num_targets, targets.end(), kNoTarget);
    used += size;
    return true;
  };
  FSDP_RETURN_IF_ERROR(ForEachPiece(begins_[index], read));
  Pad(used, row);
  return absl::OkStatus();
}

// Exchanges the halves of `value`, of `half_bits` each, and mixes them.
uint64_t Encrypt(uint64_t value, int half_bits,
                 absl::Span<const uint64_t> keys) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits, right = value & mask;
  for (const uint64_t key : keys) {
    const uint64_t next = left ^ (Mix(key ^ right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

absl::Status CheckShare(const BatchShare& share) {
  const bool is_rank = share.rank >= 0 && share.rank < share.world_size;
  if (is_rank && share.rows > 0 && share.rows % share.world_size == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a batch of ", share.rows, " rows for rank ", share.rank, " of ",
      share.world_size,
      ": ranks get equal parts; take a multiple of the number of ranks"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const RowSource>> WindowRows(TokenFile file,
                                                            int64_t seq,
                                                            LastWindow last) {
  FSDP_RETURN_IF_ERROR(CheckSeq(seq));
  if (file.description().has_mask) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens of ", file.path(),
        ": their .mask says which of each document are learned, and rows of "
        "one stream are not of documents: take --rows=packed (PackedRows())"));
  }
  const int64_t num_targets = file.num_tokens() - 1;
  int64_t num_rows = num_targets > 0 ? num_targets / seq : 0;
  if (last == LastWindow::kPadded && num_targets > num_rows * seq) ++num_rows;
  if (num_rows == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens of ", file.path(), ": there are ", file.num_tokens(),
        ", too few for one row of ", seq,
        " and the token after it: take shorter rows or more text"));
  }
  return std::make_shared<WindowRowSource>(std::move(file), seq, num_rows);
}

absl::StatusOr<std::shared_ptr<const RowSource>> PackedRows(TokenFile file,
                                                            int64_t seq,
                                                            uint64_t seed) {
  FSDP_RETURN_IF_ERROR(CheckSeq(seq));
  const auto rows = std::make_shared<PackedRowSource>(file, seq, seed);
  FSDP_RETURN_IF_ERROR(rows->Pack());
  if (rows->num_rows() > 0) return rows;
  return absl::InvalidArgumentError(
      absl::StrCat("tokens of ", file.path(),
                   ": no document has two tokens, of which the second or a "
                   "later one is learned: take more text"));
}

uint64_t MixSeeds(uint64_t seed, uint64_t number) {
  return Mix(Mix(seed + 0x9e3779b97f4a7c15) + number);
}

int64_t Permuted(int64_t place, int64_t size, uint64_t seed) {
  FSDP_CHECK(place >= 0 && place < size && size <= int64_t{1} << 62);
  int half_bits = 1;
  while (int64_t{1} << 2 * half_bits < size) ++half_bits;
  uint64_t keys[8];
  for (int round = 0; round < 8; ++round) keys[round] = MixSeeds(seed, round);
  auto value = static_cast<uint64_t>(place);
  do {
    value = Encrypt(value, half_bits, keys);
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

absl::StatusOr<Batch> ReadBatch(const RowSource& source,
                                absl::Span<const int64_t> rows) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  const int64_t seq = source.seq();
  Batch batch;
  batch.tokens = at::full({num_rows, seq}, kPadding, at::kLong);
  batch.targets = at::full({num_rows, seq}, kNoTarget, at::kLong);
  bool has_documents = false;
  int64_t* const tokens = batch.tokens.mutable_data_ptr<int64_t>();
  int64_t* const targets = batch.targets.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_rows; ++i) {
    const auto size = static_cast<size_t>(seq);
    Row row = {absl::MakeSpan(tokens + i * seq, size),
               absl::MakeSpan(targets + i * seq, size),
               {}};
    if (rows[i] < source.num_rows()) {
      FSDP_RETURN_IF_ERROR(source.Read(rows[i], row));
    }
    has_documents = has_documents || !row.documents.empty();
    if (row.documents.empty()) row.documents.push_back(0);
    for (const int64_t begin : row.documents) {
      batch.starts.push_back(i * seq + begin);
    }
  }
  if (!has_documents) batch.starts.clear();
  return batch;
}

absl::StatusOr<TokenBatches> TokenBatches::Create(
    std::shared_ptr<const RowSource> source, const BatchShare& share,
    uint64_t seed) {
  FSDP_RETURN_IF_ERROR(CheckShare(share));
  return TokenBatches(std::move(source), share, seed);
}

absl::Status TokenBatches::Seek(int64_t position) {
  if (position < 0 || position > int64_t{1} << 62) {
    return absl::InvalidArgumentError(
        absl::StrCat("the position ", position,
                     " in the data: it has to be from 0 to 2^62; "
                     "take that of another checkpoint"));
  }
  position_ = position;
  return absl::OkStatus();
}

absl::StatusOr<Batch> TokenBatches::Next() {
  std::vector<int64_t> rows;
  const int64_t first = position_ + share_.first_row();
  for (int64_t i = first; i < first + share_.own_rows(); ++i) {
    const int64_t epoch = i / source_->num_rows();
    rows.push_back(Permuted(i % source_->num_rows(), source_->num_rows(),
                            MixSeeds(seed_, epoch)));
  }
  FSDP_ASSIGN_OR_RETURN(Batch batch, ReadBatch(*source_, rows));
  position_ += share_.rows;
  return batch;
}

int64_t EvaluationBatches::num_batches() const {
  return (source->num_rows() - 1) / share.rows + 1;
}

absl::StatusOr<Batch> EvaluationBatches::Read(int64_t batch) const {
  FSDP_CHECK(batch >= 0 && batch < num_batches());
  std::vector<int64_t> rows(share.own_rows());
  std::iota(rows.begin(), rows.end(), batch * share.rows + share.first_row());
  return ReadBatch(*source, rows);
}

}  // namespace llama
