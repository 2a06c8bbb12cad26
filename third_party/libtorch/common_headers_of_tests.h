// As common_headers.h, of tests.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/common_headers.h"
