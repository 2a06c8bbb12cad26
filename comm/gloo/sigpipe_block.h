// Keeps a broken connection from ending the process.
#ifndef COMM_GLOO_SIGPIPE_BLOCK_H_
#define COMM_GLOO_SIGPIPE_BLOCK_H_

namespace fsdp::comm {

// Gloo writes to sockets whose other end may be closed, and the default answer
// of the system is SIGPIPE, which ends the program. (Python ignores that
// signal.) While this lives, the signal is blocked in the calling thread and in
// those that it starts, for good; the write then fails with EPIPE, which Gloo
// reports. Nothing changes for the rest of the process. Thread-compatible.
class SigpipeBlock {
 public:
  SigpipeBlock();
  ~SigpipeBlock();
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  bool changed_ = false;  // the signal was neither blocked nor pending before
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_SIGPIPE_BLOCK_H_
