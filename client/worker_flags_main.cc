#include <string>

#include "absl/flags/flag.h"
#include "absl/time/time.h"

ABSL_FLAG(std::string, model, "convnet", "what to train: convnet, mlp or linear");
ABSL_FLAG(
    std::string, data, "fashion-mnist",
    "what to train it on: fashion-mnist (Debian's dataset-fashion-mnist), synthetic:N (N made-up images of "
    "16 x 16; synthetic alone: 2048), or the path of a folder with MNIST's four IDX files, gzipped or plain");
ABSL_FLAG(int, epochs, 4, "how often every image is used");
ABSL_FLAG(int, batch, 64, "images a step of each worker");
ABSL_FLAG(int, accumulate, 1,
          "backwards a step, each of a part of the batch: less memory, and the same mean up to rounding");
ABSL_FLAG(int, max_steps, 0, "end after so many steps; 0: after --epochs");
ABSL_FLAG(std::string, optimizer, "adam", "what the owners run: adam");
ABSL_FLAG(double, lr, 1e-3, "learning rate");
ABSL_FLAG(std::string, lr_decay, "none", "none, or linear: from --lr at the first step to 0 after the last");
ABSL_FLAG(double, beta1, 0.9, "Adam's decay of the mean of gradients, in [0, 1)");
ABSL_FLAG(double, beta2, 0.999, "Adam's decay of the mean of their squares, in [0, 1)");
ABSL_FLAG(double, eps, 1e-8, "Adam's term against division by zero");
ABSL_FLAG(double, weight_decay, 0, "L2 term added to gradients");
ABSL_FLAG(std::string, policy, "sync",
          "sync: a step is the mean over all workers, results do not depend on timing; async: each worker's "
          "gradients "
          "are applied as they come");
ABSL_FLAG(absl::Duration, round_limit, absl::Seconds(60),
          "sync: a step that is not complete after so long fails and names who is missing");
ABSL_FLAG(absl::Duration, attach_limit, absl::Seconds(60),
          "at most so long until all workers have attached the model and its first values are there");
ABSL_FLAG(uint64_t, seed, 1,
          "of the model's first values and of the order of images; the same for all workers");
ABSL_FLAG(int, threads, 1, "threads that compute in this process");
ABSL_FLAG(bool, evaluate, true, "worker 0 measures the accuracy on the test images at the end");
ABSL_FLAG(
    std::string, progress, "auto",
    "plain (a line a second), tty (one line that updates), json (an object a line), none, or auto: tty on a "
    "terminal, else plain");
ABSL_FLAG(std::string, summary, "",
          "write the summary as JSON to this file; {name} stands for this worker's name");
