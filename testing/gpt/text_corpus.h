// Text from files, in memory, split into a part to train on and a part to
// validate with. No torch.
#ifndef TESTING_GPT_TEXT_CORPUS_H_
#define TESTING_GPT_TEXT_CORPUS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gpt {

struct TextCorpus {
  std::string train;
  std::string validation;
  int num_files = 0;
  unsigned char largest_byte = 0;
};

// Reads a file, or all text files below a directory in the order of their
// paths, without hidden ones, files with a zero byte in them and links to
// directories. Every 20th block of up to 64 KiB of the text is held out for
// validation. Errors name the path: an error of the system if something cannot
// be read, InvalidArgument for a directory without text, for more than 1 GiB,
// and if a part would be shorter than `min_bytes`.
absl::StatusOr<TextCorpus> ReadTextCorpus(const std::string& path,
                                          size_t min_bytes);

// Returns the text that is there without being asked for: the folder of
// LibTorch's C++ headers among the runfiles of the program `argv0`, or NotFound
// if the program was copied away from them.
absl::StatusOr<std::string> DefaultDataPath(const std::string& argv0);

// Splits `text` as ReadTextCorpus() does; either part may be empty.
TextCorpus SplitText(absl::string_view text);

}  // namespace gpt

#endif  // TESTING_GPT_TEXT_CORPUS_H_
