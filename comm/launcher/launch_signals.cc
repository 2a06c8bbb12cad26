#include "comm/launcher/launch_signals.h"

#include <signal.h>

#include <initializer_list>

namespace fsdp::comm {

void IgnoreQuestions() {
  for (const int question : {SIGQUIT, SIGUSR1}) {
    struct sigaction action = {};
    sigaction(question, nullptr, &action);
    const bool has_handler = (action.sa_flags & SA_SIGINFO) != 0;
    if (!has_handler && action.sa_handler == SIG_DFL) signal(question, SIG_IGN);
  }
}

}  // namespace fsdp::comm
