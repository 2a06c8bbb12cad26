// Trains a TorchScript module that returns the loss of a batch (x, y), and goes
// on where an earlier run to fewer steps has ended.
//
// usage: train NET CHECKPOINTS EXPORT STEPS [RANK WORLD_SIZE HOST:PORT]
//
// Without the last three, rank and place are those of torchrun, srun or mpirun.
#include <stdio.h>
#include <stdlib.h>

#include "capi/libtorch_fsdp.h"

enum { ROWS = 4, DIM = 8 };

// Ends the program after an error, at once, as its threads still run.
static void check(int status) {
  if (status == FSDP_OK) return;
  fprintf(stderr, "%s\n", fsdp_last_error());
  fflush(stdout);
  _Exit(status);
}

// Each rank has its own part of the data.
static void fill(int step, int rank, float* x, float* y) {
  for (int i = 0; i < ROWS * DIM; ++i) {
    x[i] = (float)((7 * i + 5 * step + 3 * rank) % 9 - 4) / 8;
  }
  for (int i = 0; i < ROWS; ++i) {
    y[i] = (float)((i + step + rank) % 5 - 2) / 4;
  }
}

int main(int argc, char** argv) {
  if (argc != 5 && argc != 8) {
    fprintf(stderr,
            "usage: train NET CHECKPOINTS EXPORT STEPS "
            "[RANK WORLD_SIZE HOST:PORT]\n");
    return 2;
  }
  const int steps = atoi(argv[4]);
  int rank = 0;
  fsdp_ranks* ranks = NULL;
  if (argc == 8) {
    check(fsdp_ranks_connect(atoi(argv[5]), atoi(argv[6]), argv[7], 60.0,
                             &ranks));
  } else {
    check(fsdp_ranks_connect_from_environment(60.0, &ranks));
  }
  check(fsdp_ranks_rank(ranks, &rank));

  fsdp_model* model = NULL;
  const fsdp_model_options options = {FSDP_MODEL_OPTIONS_VERSION,
                                      FSDP_AS_STORED, "Block"};
  check(fsdp_model_load(ranks, argv[1], &options, &model));
  check(fsdp_model_use_adamw(model, 0.01, 0.9, 0.999, 1e-6, 0.01));
  int64_t last = 0;  // step
  check(fsdp_model_resume(model, argv[2], &last));

  float x[ROWS * DIM], y[ROWS];
  const int64_t x_sizes[] = {ROWS, DIM}, y_sizes[] = {ROWS, 1};
  const fsdp_tensor batch[] = {{x, FSDP_FLOAT32, 2, x_sizes},
                               {y, FSDP_FLOAT32, 2, y_sizes}};
  for (int step = last > 0 ? (int)last + 1 : 1; step <= steps; ++step) {
    double loss = 0;
    fill(step, rank, x, y);
    check(fsdp_model_forward(model, batch, 2));
    check(fsdp_model_loss(model, &loss));
    check(fsdp_model_backward(model));
    check(fsdp_model_clip_grad_norm(model, 1.0, NULL));
    check(fsdp_model_step(model));
    check(fsdp_ranks_mean(ranks, loss, &loss));
    if (rank == 0) printf("step %d loss %12.9f\n", step, loss);
    if (step == steps) check(fsdp_model_save(model, argv[2], step));
  }
  check(fsdp_model_export(model, argv[3]));
  check(fsdp_model_destroy(model));
  check(fsdp_ranks_destroy(ranks));
  return 0;
}
