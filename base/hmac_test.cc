#include "base/hmac.h"

#include <set>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

std::string Hex(const std::string& bytes) {
  return absl::BytesToHexString(bytes);
}

// RFC 4231, test cases 1, 2, 3 and 6; then no key and no text.
TEST(HmacSha256Test, VectorsOfTheStandard) {
  EXPECT_EQ(Hex(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Hex(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Hex(HmacSha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(
      Hex(HmacSha256(std::string(131, '\xaa'),
                     "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(Hex(HmacSha256("", "")),
            "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(SameInConstantTimeTest, ComparesAllBytes) {
  EXPECT_TRUE(SameInConstantTime("", ""));
  EXPECT_TRUE(SameInConstantTime("abc", "abc"));
  EXPECT_FALSE(SameInConstantTime("abc", "abd"));
  EXPECT_FALSE(SameInConstantTime("abc", "bbc"));
  EXPECT_FALSE(SameInConstantTime("abc", "abcd"));
  EXPECT_FALSE(SameInConstantTime("", "a"));
}

TEST(RandomBytesTest, AreNeverTheSame) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) seen.insert(RandomBytes(32));
  EXPECT_EQ(seen.size(), 100);
  EXPECT_EQ(RandomBytes(0), "");
  EXPECT_EQ(RandomBytes(256).size(), 256);
}

}  // namespace
}  // namespace fsdp
