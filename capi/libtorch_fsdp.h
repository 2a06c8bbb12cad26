// Sharded training for programs in C, Fortran, Java or any language that can
// call C: connects the ranks of a job, shards a TorchScript module over them,
// and trains and saves it. On the CPU. capi/train.c and capi/train.f90 are
// whole programs.
//
// Results: each function but fsdp_version() and fsdp_last_error() returns
// FSDP_OK or the code of an error, and writes through its pointers only if it
// returns FSDP_OK. No exception leaves a function.
//   - A null pointer that is not allowed, or a number out of its range, is
//     FSDP_INVALID_ARGUMENT on this rank alone: nothing was done, and the call
//     may be repeated with better arguments. Where the text names neither, the
//     code is that of another error, such as ranks that call different
//     functions.
//   - Collective functions are called by all ranks in the same order. Where one
//     rank refuses a file, a folder or a model, all refuse, with "rank 2: " in
//     front of the text.
//   - After any other error, such as a lost rank or a script that fails in its
//     forward, the ranks of the job are of no more use: end the program, as by
//     _Exit().
//
// Threads: a handle is used by one thread at a time, and a model's forward and
// backward by the same one. Computing uses as many threads as OMP_NUM_THREADS
// says.
//
// Compatibility: names, values and layouts here stay as they are; a struct with
// a version may get another number for a longer form.
#ifndef CAPI_LIBTORCH_FSDP_H_
#define CAPI_LIBTORCH_FSDP_H_

// As C has them. NOLINTBEGIN(modernize-*, readability-identifier-naming)
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The version of the header. fsdp_version() returns that of the library.
#define FSDP_VERSION "0.1.0"

// The codes are those of absl::StatusCode.
enum {
  FSDP_OK = 0,
  FSDP_CANCELLED = 1,
  FSDP_UNKNOWN = 2,  // such as what a script raises
  FSDP_INVALID_ARGUMENT = 3,
  FSDP_DEADLINE_EXCEEDED = 4,
  FSDP_NOT_FOUND = 5,
  FSDP_ALREADY_EXISTS = 6,
  FSDP_PERMISSION_DENIED = 7,
  FSDP_RESOURCE_EXHAUSTED = 8,
  FSDP_FAILED_PRECONDITION = 9,
  FSDP_ABORTED = 10,  // another rank has failed
  FSDP_OUT_OF_RANGE = 11,
  FSDP_UNIMPLEMENTED = 12,
  FSDP_INTERNAL = 13,
  FSDP_UNAVAILABLE = 14,
  FSDP_DATA_LOSS = 15
};

// Dtypes of tensors.
enum {
  FSDP_AS_STORED = 0,  // for fsdp_model_options alone
  FSDP_FLOAT32 = 1,
  FSDP_FLOAT64 = 2,
  FSDP_FLOAT16 = 3,
  FSDP_BFLOAT16 = 4,
  FSDP_INT32 = 5,
  FSDP_INT64 = 6,
  FSDP_UINT8 = 7,
  FSDP_BOOL = 8
};

// The most dimensions of a tensor.
#define FSDP_MAX_DIMS 8

// One process's end of a job.
typedef struct fsdp_ranks fsdp_ranks;
// A sharded module with its optimizer and its last output.
typedef struct fsdp_model fsdp_model;

// Returns the version of the library, such as "0.1.0".
const char* fsdp_version(void);

// Returns the text of the last error that a function has returned to the
// calling thread, such as "NOT_FOUND: ...", or "" if there was none. It is
// valid until the thread's next error. Other threads have their own.
const char* fsdp_last_error(void);

// --- Ranks -------------------------------------------------------------------
// All processes of a job call one of the first two functions, once. The timeout
// is how long all ranks have to connect, and how long this rank later waits for
// others in one step, in seconds; it is positive and finite.

// Reads what torchrun, srun or mpirun has set. With nothing set the process is
// the only rank. Collective.
int fsdp_ranks_connect_from_environment(double timeout_seconds,
                                        fsdp_ranks** ranks);

// For a program that knows its rank and the number of ranks, as from
// MPI_Comm_rank() and MPI_Comm_size(). `address` is "host:port" or
// "[::1]:port", the same on all ranks: a free port of rank 0's host, where rank
// 0 listens. It may be null for one rank. The environment's FSDP_JOB_SECRET,
// GLOO_SOCKET_IFNAME and FSDP_INSPECT_DIR count here, too.
// Collective.
int fsdp_ranks_connect(int rank, int world_size, const char* address,
                       double timeout_seconds, fsdp_ranks** ranks);

// These make *rank this process's rank, from 0 on, and *size how many there
// are.
int fsdp_ranks_rank(const fsdp_ranks* ranks, int* rank);
int fsdp_ranks_size(const fsdp_ranks* ranks, int* size);

// Returns when all ranks have called it. Collective.
int fsdp_ranks_barrier(fsdp_ranks* ranks);

// Makes *mean the mean of the ranks' values. Collective.
int fsdp_ranks_mean(fsdp_ranks* ranks, double value, double* mean);

// Frees the handle; null does nothing. The rank leaves the job with this or
// with its last model, whichever is later; rank 0 then waits a few seconds for
// the others.
int fsdp_ranks_destroy(fsdp_ranks* ranks);

// --- Models ------------------------------------------------------------------

// The version of fsdp_model_options as it is declared here.
#define FSDP_MODEL_OPTIONS_VERSION 1

// How a model is loaded and sharded; the same on all ranks.
typedef struct fsdp_model_options {
  int32_t version;  // FSDP_MODEL_OPTIONS_VERSION
  // The dtype to compute in, to which floating-point inputs are cast; sums of
  // gradients are float32 then. FSDP_AS_STORED leaves all as it is.
  int32_t compute_dtype;
  // Names of the script's classes, "Block,Embedding": each module of one of
  // these is gathered alone. A class that the script lacks is refused. Null or
  // empty: the model is gathered as a whole.
  const char* unit_types;
} fsdp_model_options;

// Loads what torch.jit.save() has written to the file `path`, and shards its
// parameters. All ranks start from rank 0's values. Null options are the
// defaults: FSDP_AS_STORED, no unit types. Collective.
int fsdp_model_load(fsdp_ranks* ranks, const char* path,
                    const fsdp_model_options* options, fsdp_model** model);

// Frees the handle; null does nothing.
int fsdp_model_destroy(fsdp_model* model);

// Chooses between training (not 0), as after loading, and evaluation (0), in
// which forward keeps nothing for backward.
int fsdp_model_set_training(fsdp_model* model, int training);

// A tensor of the caller's, dense and in row-major order: the sizes of a
// Fortran array in reverse.
typedef struct fsdp_tensor {
  const void* data;      // of the host; only read
  int32_t dtype;         // but FSDP_AS_STORED
  int32_t ndim;          // 0 to FSDP_MAX_DIMS
  const int64_t* sizes;  // `ndim` numbers; may be null if there are none
} fsdp_tensor;

// Calls the script's forward with these tensors, which are copied before it
// returns; `inputs` may be null if there are none. The script returns one
// tensor, which the model keeps until the next forward. Collective.
int fsdp_model_forward(fsdp_model* model, const fsdp_tensor* inputs,
                       int num_inputs);

// Makes *loss the value of the last output, of one element.
int fsdp_model_loss(const fsdp_model* model, double* loss);

// Describes the last output. `sizes` has room for FSDP_MAX_DIMS numbers, of
// which it sets the first *ndim.
int fsdp_model_output_shape(const fsdp_model* model, int32_t* dtype,
                            int32_t* ndim, int64_t* sizes);

// Copies the last output to `data`. `bytes` is its exact size.
int fsdp_model_output(const fsdp_model* model, int64_t bytes, void* data);

// Computes the gradients of the last output, a loss of one element: the mean of
// the ranks' gradients. Once for each forward. Collective.
int fsdp_model_backward(fsdp_model* model);

// Scales the gradients so that their norm over all ranks is at most `max_norm`,
// and sets *norm, unless that is null, to the norm before. Collective.
int fsdp_model_clip_grad_norm(fsdp_model* model, double max_norm, double* norm);

// Gives the model an AdamW. An optimizer that it had is gone, with its states.
int fsdp_model_use_adamw(fsdp_model* model, double learning_rate, double beta1,
                         double beta2, double eps, double weight_decay);

// Makes later steps use this rate, which is not negative, for all parameters.
// FSDP_FAILED_PRECONDITION: the model has no optimizer.
int fsdp_model_set_learning_rate(fsdp_model* model, double learning_rate);

// Makes a step of the optimizer, and drops the gradients.
int fsdp_model_step(fsdp_model* model);

// --- Files -------------------------------------------------------------------

// Saves model, optimizer and random states as the checkpoint of `step` >= 0 in
// `folder`, which is made if only its parent exists. FSDP_ALREADY_EXISTS: it
// has that step, or a later one that this run has not loaded. Collective.
int fsdp_model_save(fsdp_model* model, const char* folder, int64_t step);

// Loads the newest checkpoint of `folder`, after the optimizer was made as it
// was then, and sets *step to its step, or to -1 if there is none. Any number
// of ranks can load it. Collective.
int fsdp_model_resume(fsdp_model* model, const char* folder, int64_t* step);

// Writes parameters and buffers, by the script's names, as safetensors to a new
// folder. FSDP_ALREADY_EXISTS: there is something of that name. Collective.
int fsdp_model_export(fsdp_model* model, const char* folder);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(modernize-*, readability-identifier-naming)

#endif  // CAPI_LIBTORCH_FSDP_H_
