#ifndef THIRD_PARTY_GLOO_ALGORITHM_H_
#define THIRD_PARTY_GLOO_ALGORITHM_H_

#include "gloo/context.h"

#endif  // THIRD_PARTY_GLOO_ALGORITHM_H_
