// A layer of 8 experts over 2 ranks, run on the CPU emulator and compared with the FP64 reference.
#include <moewave/moewave.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const moewave::LayerShape shape{.hidden = 64, .intermediate = 32, .experts = 8, .topk = 2};
  const std::array<std::int64_t, 2> tokens_per_rank{50, 31};
  const moewave::HostWeights weights = moewave::random_weights(shape, 1);
  const moewave::HostBatch batch = moewave::random_batch(shape, tokens_per_rank, "uniform", 2, false);

  moewave::EmulatedLayer layer(shape, 2, 64);
  std::vector<moewave::Bf16> output;
  layer.forward(weights, batch, output);

  const moewave::ReferenceResult reference = moewave::run_reference(shape, weights, batch, false);
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < output.size(); ++i) {
    difference += std::pow(moewave::to_float(output[i]) - reference.output[i], 2);
    norm += std::pow(reference.output[i], 2);
  }
  const double error = std::sqrt(difference / norm);
  std::printf("moewave %s: relative error %.2e (bound 5e-3)\n", moewave::kVersion, error);
  return output.size() == reference.output.size() && error < 5e-3 ? 0 : 1;
}
