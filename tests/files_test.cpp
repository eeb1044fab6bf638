// The weights, inputs and output file: layouts of published checkpoints, what is refused, what is written.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "files_support.h"
#include "io/layer_files.h"

namespace moewave::test {
namespace {

using io::DType;
using io::load_inputs;
using io::load_weights;
using io::LoadedInputs;
using io::LoadedWeights;
using Strings = std::initializer_list<std::string_view>;

constexpr std::int64_t kHidden = 4;
constexpr std::int64_t kWidth = 3;
constexpr std::int64_t kShared = 2;
constexpr std::int64_t kExperts = 3;
constexpr std::int64_t kMatrix = kHidden * kWidth;

/// Values of the made-up layer: whole numbers that BF16 holds exactly, another range for every matrix.
float gate_first(std::int64_t expert) { return static_cast<float>(40 * expert); }
float up_first(std::int64_t expert) { return gate_first(expert) + kMatrix; }
float down_first(std::int64_t expert) { return gate_first(expert) + 2 * kMatrix; }

struct Names {
  const char* gate;
  const char* up;
  const char* down;
};
constexpr Names kProj{"gate_proj.weight", "up_proj.weight", "down_proj.weight"};
constexpr Names kNumbered{"w1.weight", "w3.weight", "w2.weight"};

void add_experts(FileMaker& maker, const std::string& base, const Names& names, std::int64_t begin = 0,
                 std::int64_t end = kExperts) {
  for (std::int64_t e = begin; e < end; ++e) {
    const std::string expert = base + "experts." + std::to_string(e) + ".";
    maker.add_bf16(expert + names.gate, {kWidth, kHidden}, gate_first(e));
    maker.add_bf16(expert + names.up, {kWidth, kHidden}, up_first(e));
    maker.add_bf16(expert + names.down, {kHidden, kWidth}, down_first(e));
  }
}

void add_stacked(FileMaker& maker, const std::string& base) {
  std::vector<Bf16> gate_up;
  std::vector<Bf16> down;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const auto both = FileMaker::counting(2 * kMatrix, gate_first(e));
    const auto third = FileMaker::counting(kMatrix, down_first(e));
    gate_up.insert(gate_up.end(), both.begin(), both.end());
    down.insert(down.end(), third.begin(), third.end());
  }
  maker.add(base + "experts.gate_up_proj", DType::kBf16, {kExperts, 2 * kWidth, kHidden}, gate_up);
  maker.add(base + "experts.down_proj", DType::kBf16, {kExperts, kHidden, kWidth}, down);
}

void add_shared(FileMaker& maker, const std::string& base) {
  maker.add_bf16(base + "gate_proj.weight", {kShared, kHidden}, 200);
  maker.add_bf16(base + "up_proj.weight", {kShared, kHidden}, 210);
  maker.add_bf16(base + "down_proj.weight", {kHidden, kShared}, 220);
}

/// Attention and norms, as they stand in every layer of a model.
void add_rest_of_layer(FileMaker& maker, const std::string& layer) {
  maker.add_bf16(layer + "input_layernorm.weight", {kHidden}, 1);
  maker.add_bf16(layer + "post_attention_layernorm.weight", {kHidden}, 1);
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    maker.add_bf16(layer + "self_attn." + name + ".weight", {kHidden, kHidden}, 1);
  }
}

void expect_experts(const LoadedWeights& loaded) {
  EXPECT_EQ(loaded.hidden, kHidden);
  EXPECT_EQ(loaded.intermediate, kWidth);
  ASSERT_EQ(loaded.experts, kExperts);
  std::vector<Bf16> gate_up;
  std::vector<Bf16> down;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (const Bf16 value : FileMaker::counting(2 * kMatrix, gate_first(e))) gate_up.push_back(value);
    for (const Bf16 value : FileMaker::counting(kMatrix, down_first(e))) down.push_back(value);
  }
  EXPECT_EQ(loaded.weights.gate_up, gate_up);
  EXPECT_EQ(loaded.weights.down, down);
}

void expect_shared(const LoadedWeights& loaded) {
  EXPECT_EQ(loaded.shared_intermediate, kShared);
  EXPECT_EQ(loaded.weights.shared_gate, FileMaker::counting(kShared * kHidden, 200));
  EXPECT_EQ(loaded.weights.shared_up, FileMaker::counting(kShared * kHidden, 210));
  EXPECT_EQ(loaded.weights.shared_down, FileMaker::counting(kShared * kHidden, 220));
}

void expect_no_shared(const LoadedWeights& loaded) {
  EXPECT_EQ(loaded.shared_intermediate, 0);
  EXPECT_TRUE(loaded.weights.shared_gate.empty());
  EXPECT_TRUE(loaded.weights.shared_up.empty());
  EXPECT_TRUE(loaded.weights.shared_down.empty());
}

/// {"metadata":{...},"weight_map":{...}} for these pairs of tensor and shard.
std::string index_of(const std::vector<std::pair<std::string, std::string>>& places) {
  std::string map;
  for (const auto& [tensor, shard] : places) map += (map.empty() ? "\"" : ",\"") + tensor + "\":\"" + shard + "\"";
  return R"({"metadata":{"total_size":1},"weight_map":{)" + map + "}}";
}

class WeightsFile : public testing::Test {
 protected:
  LoadedWeights load(const FileMaker& maker, const std::string& prefix = "") {
    return load_weights(maker.write(folder_ / "model.safetensors"), prefix);
  }
  void refused(const FileMaker& maker, const std::string& prefix, Strings parts) {
    const std::string path = maker.write(folder_ / "model.safetensors");
    expect_input_error([&] { load_weights(path, prefix); }, parts);
  }
  /// A good layer without prefix and one tensor more.
  void extra_refused(const std::string& name, Strings parts) {
    SCOPED_TRACE(name);
    FileMaker maker;
    add_experts(maker, "", kProj);
    maker.add_bf16(name, {kWidth, kHidden}, 0);
    refused(maker, "", parts);
  }

  TempFolder folder_;
};

// ---- Layouts
// ----------------------------------------------------------------------------------------------------------

TEST_F(WeightsFile, Qwen3MoeLayerLoads) {
  FileMaker maker;
  maker.add_bf16("model.embed_tokens.weight", {8, kHidden}, 0).add_bf16("lm_head.weight", {8, kHidden}, 0);
  for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
    add_rest_of_layer(maker, layer);
    maker.add_bf16(std::string(layer) + "mlp.gate.weight", {kExperts, kHidden}, 0);
    add_experts(maker, std::string(layer) + "mlp.", kProj);
  }
  for (const char* prefix : {"model.layers.1.mlp", "model.layers.1.mlp."}) {
    const LoadedWeights loaded = load(maker, prefix);
    expect_experts(loaded);
    expect_no_shared(loaded);
    ASSERT_EQ(loaded.notes.size(), 1u);
    EXPECT_NE(loaded.notes[0].find("'model.layers.1.mlp.gate.weight'"), std::string::npos) << loaded.notes[0];
  }
}

TEST_F(WeightsFile, MixtralLayerLoads) {
  FileMaker maker;
  add_rest_of_layer(maker, "model.layers.0.");
  maker.add_bf16("model.layers.0.block_sparse_moe.gate.weight", {kExperts, kHidden}, 0);
  add_experts(maker, "model.layers.0.block_sparse_moe.", kNumbered);
  const LoadedWeights loaded = load(maker, "model.layers.0.block_sparse_moe");
  expect_experts(loaded);
  expect_no_shared(loaded);
  EXPECT_EQ(loaded.notes.size(), 1u);
}

TEST_F(WeightsFile, DeepSeekV3LayerOverTwoShardsLoads) {
  const std::string base = "model.layers.3.mlp.";
  FileMaker first;
  add_rest_of_layer(first, "model.layers.3.");
  first.add_bf16(base + "gate.weight", {kExperts, kHidden}, 0);
  first.add(base + "gate.e_score_correction_bias", DType::kF32, {kExperts}, std::vector<float>(kExperts));
  add_experts(first, base, kProj, 0, 2);
  FileMaker second;
  add_experts(second, base, kProj, 2, 3);
  add_shared(second, base + "shared_experts.");

  std::vector<std::pair<std::string, std::string>> places = {
      {"model.layers.0.mlp.gate_proj.weight", "model-00003-of-00003.safetensors"}};  // a shard that nobody has
  for (const auto& name : first.names()) places.emplace_back(name, "model-00001-of-00003.safetensors");
  for (const auto& name : second.names()) places.emplace_back(name, "model-00002-of-00003.safetensors");
  first.write(folder_ / "model-00001-of-00003.safetensors");
  second.write(folder_ / "model-00002-of-00003.safetensors");
  const std::string index = folder_ / "model.safetensors.index.json";
  write_bytes(index, index_of(places));

  const LoadedWeights loaded = load_weights(index, "model.layers.3.mlp");
  expect_experts(loaded);
  expect_shared(loaded);
  ASSERT_EQ(loaded.notes.size(), 1u);
  EXPECT_NE(loaded.notes[0].find("e_score_correction_bias"), std::string::npos);
  expect_input_error([&] { load_weights(index, "model.layers.0.mlp"); }, {"no experts under", "'model.layers.3.mlp'"});
}

TEST_F(WeightsFile, StackedLayerLoadsWithAndWithoutPrefix) {
  for (const std::string base : {"", "model.layers.7.mlp."}) {
    FileMaker maker;
    add_stacked(maker, base);
    add_shared(maker, base + "shared_expert.");
    maker.add_bf16(base + "router.weight", {kExperts, kHidden}, 0).add_bf16(base + "router.bias", {kExperts}, 0);
    const LoadedWeights loaded = load(maker, base);
    expect_experts(loaded);
    expect_shared(loaded);
    EXPECT_EQ(loaded.notes.size(), 1u);
  }
}

TEST_F(WeightsFile, MoreThanTenExpertsKeepTheirNumbers) {
  FileMaker maker;
  add_experts(maker, "", kProj, 0, 12);
  const LoadedWeights loaded = load(maker);
  ASSERT_EQ(loaded.experts, 12);
  for (std::int64_t e = 0; e < 12; ++e) {
    EXPECT_EQ(loaded.weights.down[static_cast<std::size_t>(e * kMatrix)], to_bf16(down_first(e))) << e;
  }
}

TEST_F(WeightsFile, Float32AndFloat16AreConverted) {
  const std::vector<float> f32(kMatrix, 1.0f + 0x1p-8f);         // a tie, to even: 1
  const std::vector<std::uint16_t> f16(kMatrix, 0x3c00u | 12u);  // 1 + 12/1024, to 1 + 2/128
  const std::vector<Bf16> bf16(kMatrix, to_bf16(3.0f));
  FileMaker maker;
  maker.add("experts.0.gate_proj.weight", DType::kF32, {kWidth, kHidden}, f32);
  maker.add("experts.0.up_proj.weight", DType::kF16, {kWidth, kHidden}, f16);
  maker.add("experts.0.down_proj.weight", DType::kBf16, {kHidden, kWidth}, bf16);
  const LoadedWeights loaded = load(maker);
  EXPECT_EQ(loaded.weights.gate_up.front(), to_bf16(1.0f));
  EXPECT_EQ(loaded.weights.gate_up.back(), to_bf16(1.0f + 2.0f / 128));
  EXPECT_EQ(loaded.weights.down.front(), to_bf16(3.0f));
}

// ---- Prefixes
// ---------------------------------------------------------------------------------------------------------

TEST_F(WeightsFile, AWrongPrefixIsRefusedWithTheOnesThatAreThere) {
  FileMaker maker;
  for (const int layer : {0, 1, 2, 10, 11, 20}) {
    add_experts(maker, std::string("model.layers.") + std::to_string(layer) + ".mlp.", kProj);
  }
  refused(maker, "model.layers.5.mlp",
          {"no experts under prefix 'model.layers.5.mlp'",
           "'model.layers.0.mlp', 'model.layers.1.mlp', 'model.layers.2.mlp', 'model.layers.10.mlp' and 2 more"});
  refused(maker, "", {"no experts without a prefix", "'model.layers.0.mlp'"});
  refused(maker, "model.layers.2", {"under the prefix 'model.layers.2.mlp'"});
  refused(maker, "model.layers.2.mlp.experts", {"under the prefix 'model.layers.2.mlp'"});
  refused(maker, "model.layers.1.ml", {"no experts under prefix 'model.layers.1.ml'"});
  refused(maker, ".", {"no experts without a prefix"});
}

TEST_F(WeightsFile, TheOnlyLayerIsSuggestedWhenNoPrefixIsGiven) {
  FileMaker maker;
  add_stacked(maker, "model.layers.7.mlp.");
  refused(maker, "", {"no experts without a prefix; experts are there under the prefix 'model.layers.7.mlp'"});
}

TEST_F(WeightsFile, APrefixForAFileWithoutOneIsRefused) {
  FileMaker maker;
  add_stacked(maker, "");
  refused(maker, "mlp", {"no experts under prefix 'mlp'; experts are there without a prefix"});
}

TEST_F(WeightsFile, AFileWithoutExpertsIsRefused) {
  FileMaker maker;
  maker.add_bf16("mlp.gate_proj.weight", {kWidth, kHidden}, 0);
  add_shared(maker, "mlp.shared_experts.");
  refused(maker, "mlp", {"no tensor in it is named like an expert's"});
}

// ---- What is never ignored
// --------------------------------------------------------------------------------------------

TEST_F(WeightsFile, TensorsThatWouldChangeTheResultAreRefusedByName) {
  extra_refused("experts.0.gate_proj.bias", {"'experts.0.gate_proj.bias'", "is a bias"});
  extra_refused("experts.gate_up_proj_bias", {"'experts.gate_up_proj_bias'", "is a bias"});
  extra_refused("shared_expert.up_proj.bias", {"'shared_expert.up_proj.bias'", "is a bias"});
  extra_refused("shared_expert_gate.weight", {"'shared_expert_gate.weight'", "gate on the shared expert"});
  extra_refused("experts.1.up_proj.weight_scale_inv", {"'experts.1.up_proj.weight_scale_inv'", "quantised"});
  extra_refused("experts.1.up_proj.weight_scale", {"'experts.1.up_proj.weight_scale'", "quantised"});
  extra_refused("experts.1.up_proj.qweight", {"quantised"});
  extra_refused("experts.gate_up_proj_blocks", {"quantised"});
  extra_refused("experts.0.norm.weight", {"'experts.0.norm.weight'", "is unknown"});
  extra_refused("experts.00.gate_proj.weight", {"'experts.00.gate_proj.weight'", "is unknown"});
  extra_refused("experts.-1.gate_proj.weight", {"is unknown"});
  extra_refused("experts.99999999999999999999.gate_proj.weight", {"is unknown"});
  extra_refused("experts", {"'experts' is unknown"});
  extra_refused("norm.weight", {"'norm.weight' is unknown"});
  extra_refused("shared_experts.norm.weight", {"'shared_experts.norm.weight' is unknown"});
}

TEST_F(WeightsFile, DtypesThatCannotBeUsedAreRefusedByName) {
  for (const DType dtype : {DType::kF64, DType::kI64, DType::kI32, DType::kI16, DType::kI8, DType::kU8, DType::kBool,
                            DType::kF8E4M3, DType::kF8E5M2}) {
    FileMaker maker;
    maker.add_zeros("experts.0.gate_proj.weight", DType::kBf16, {kWidth, kHidden});
    maker.add_zeros("experts.0.up_proj.weight", dtype, {kWidth, kHidden});
    maker.add_zeros("experts.0.down_proj.weight", DType::kBf16, {kHidden, kWidth});
    const std::string is = "'experts.0.up_proj.weight' is " + std::string(io::dtype_name(dtype));
    refused(maker, "", {is, "allowed: BF16, F32, F16"});
  }
}

TEST_F(WeightsFile, MixedLayoutsAreRefused) {
  FileMaker both;
  add_stacked(both, "");
  add_experts(both, "", kProj);
  refused(both, "", {"another layout"});
  FileMaker customs;
  add_experts(customs, "", kProj, 0, 2);
  add_experts(customs, "", kNumbered, 2, 3);
  refused(customs, "", {"'experts.2.w1.weight'", "another layout than 'experts.0.down_proj.weight'"});
  FileMaker shared;
  add_stacked(shared, "");
  add_shared(shared, "shared_expert.");
  add_shared(shared, "shared_experts.");
  refused(shared, "", {"'shared_experts.down_proj.weight'", "one of shared_expert. and shared_experts."});
}

TEST_F(WeightsFile, MissingTensorsAreNamed) {
  FileMaker gap;
  add_experts(gap, "mlp.", kProj, 0, 2);
  add_experts(gap, "mlp.", kProj, 3, 5);
  refused(gap, "mlp", {"layer 'mlp'", "expert 2 is missing", "up to 4"});
  FileMaker late;
  add_experts(late, "", kProj, 1, 3);
  refused(late, "", {"expert 0 is missing"});
  FileMaker far;
  add_experts(far, "", kProj);
  far.add_bf16("experts.9000000000000000000.up_proj.weight", {kWidth, kHidden}, 0);
  refused(far, "", {"expert 3 is missing", "up to 9000000000000000000"});
  FileMaker half;
  add_experts(half, "", kNumbered);
  half.add_bf16("experts.3.w1.weight", {kWidth, kHidden}, 0);
  refused(half, "", {"'experts.3.w3.weight' is missing"});
  FileMaker up;
  up.add_bf16("experts.gate_up_proj", {1, 2, 1}, 0);
  refused(up, "", {"'experts.down_proj' is missing"});
  FileMaker down;
  down.add_bf16("experts.down_proj", {1, 1, 1}, 0);
  refused(down, "", {"'experts.gate_up_proj' is missing"});
  FileMaker shared;
  add_stacked(shared, "");
  shared.add_bf16("shared_expert.gate_proj.weight", {kShared, kHidden}, 0);
  refused(shared, "", {"'shared_expert.up_proj.weight' is missing"});
}

TEST_F(WeightsFile, ShapesThatDoNotFitAreNamed) {
  const auto expert_refused = [this](std::vector<std::int64_t> gate, std::vector<std::int64_t> up,
                                     std::vector<std::int64_t> down, Strings parts) {
    FileMaker maker;
    add_experts(maker, "", kProj, 0, 1);
    maker.add_zeros("experts.1.gate_proj.weight", DType::kBf16, gate);
    maker.add_zeros("experts.1.up_proj.weight", DType::kBf16, up);
    maker.add_zeros("experts.1.down_proj.weight", DType::kBf16, down);
    refused(maker, "", parts);
  };
  expert_refused({3, 5}, {3, 4}, {4, 3}, {"'experts.1.gate_proj.weight' is [3, 5]", "asks for [3, 4]"});
  expert_refused({3, 4}, {4, 3}, {4, 3}, {"'experts.1.up_proj.weight' is [4, 3]", "asks for [3, 4]"});
  expert_refused({3, 4}, {3, 4}, {3, 4}, {"'experts.1.down_proj.weight' is [3, 4]", "asks for [4, 3]"});
  expert_refused({12}, {3, 4}, {4, 3}, {"'experts.1.gate_proj.weight' is [12]", "2 dimensions"});
  expert_refused({3, 4}, {3, 4, 1}, {4, 3}, {"'experts.1.up_proj.weight' is [3, 4, 1]"});
  expert_refused({0, 4}, {3, 4}, {4, 3}, {"is [0, 4]", "at least 1"});

  const auto stacked_refused = [this](std::vector<std::int64_t> gate_up, std::vector<std::int64_t> down,
                                      Strings parts) {
    FileMaker maker;
    maker.add_zeros("experts.gate_up_proj", DType::kBf16, gate_up);
    maker.add_zeros("experts.down_proj", DType::kBf16, down);
    refused(maker, "", parts);
  };
  stacked_refused({2, 6, 4}, {3, 4, 3}, {"'experts.down_proj' is [3, 4, 3]", "asks for [2, 4, 3]"});
  stacked_refused({2, 5, 4}, {2, 4, 2}, {"'experts.gate_up_proj' is [2, 5, 4]", "must be even"});
  stacked_refused({2, 4, 6}, {2, 3, 4}, {"'experts.gate_up_proj' is [2, 4, 6]", "transposed"});
  stacked_refused({12, 4}, {2, 4, 3}, {"'experts.gate_up_proj' is [12, 4]", "3 dimensions"});
  stacked_refused({0, 6, 4}, {0, 4, 3}, {"at least 1"});

  FileMaker shared;
  add_stacked(shared, "");
  shared.add_zeros("shared_expert.gate_proj.weight", DType::kBf16, {kShared, kHidden + 1});
  shared.add_zeros("shared_expert.up_proj.weight", DType::kBf16, {kShared, kHidden + 1});
  shared.add_zeros("shared_expert.down_proj.weight", DType::kBf16, {kHidden + 1, kShared});
  refused(shared, "", {"'shared_expert.gate_proj.weight' is [2, 5]", "hidden size is 4"});
}

// ---- Shards
// -----------------------------------------------------------------------------------------------------------

class ShardedWeightsFile : public testing::Test {
 protected:
  ShardedWeightsFile() {
    add_stacked(shard_, "mlp.");
    shard_.write(folder_ / "one.safetensors");
  }
  void refused(const std::string& index, Strings parts) {
    SCOPED_TRACE(index);
    write_bytes(folder_ / "model.safetensors.index.json", index);
    expect_input_error([&] { load_weights(folder_ / "model.safetensors.index.json", "mlp"); }, parts);
  }
  std::string all_in(const std::string& shard) const {
    return index_of({{"mlp.experts.gate_up_proj", shard}, {"mlp.experts.down_proj", shard}});
  }

  TempFolder folder_;
  FileMaker shard_;
};

TEST_F(ShardedWeightsFile, ShardsMayBeLinksAndLieInSubfolders) {
  std::filesystem::create_directories(folder_ / "snapshot/sub");
  std::filesystem::create_symlink("../../one.safetensors", folder_ / "snapshot/sub/s.safetensors");
  write_bytes(folder_ / "snapshot/i.json", all_in("sub/s.safetensors"));
  expect_experts(load_weights(folder_ / "snapshot/i.json", "mlp"));
}

TEST_F(ShardedWeightsFile, AMissingShardIsNamed) {
  refused(all_in("two.safetensors"), {"two.safetensors", "No such file"});
}

TEST_F(ShardedWeightsFile, ATensorThatItsShardLacksIsNamed) {
  refused(index_of({{"mlp.experts.gate_up_proj", "one.safetensors"},
                    {"mlp.experts.down_proj", "one.safetensors"},
                    {"mlp.gate.weight", "one.safetensors"}}),
          {"one.safetensors", "has no tensor 'mlp.gate.weight'", "index.json"});
}

TEST_F(ShardedWeightsFile, ATensorThatTheIndexLacksIsNamed) {
  refused(index_of({{"mlp.experts.gate_up_proj", "one.safetensors"}}),
          {"one.safetensors", "'mlp.experts.down_proj' is not listed there"});
}

TEST_F(ShardedWeightsFile, AShardOutsideTheFolderIsRefused) {
  for (const char* shard : {"../one.safetensors", "sub/../../one.safetensors", "/one.safetensors", "..", ""}) {
    refused(all_in(shard), {"is not a file in the index's folder"});
  }
  refused(all_in("a\\u0000b"), {"is not a file in the index's folder"});
}

TEST_F(ShardedWeightsFile, AnIndexThatIsNoneIsRefused) {
  refused("", {"not valid JSON"});
  refused("{", {"not valid JSON"});
  refused("[]", {"not an object"});
  refused("{}", {"no object weight_map"});
  refused(R"({"weight_map":[]})", {"no object weight_map"});
  refused(R"({"weight_map":{"t":1}})", {"shard of tensor 't' is not a string"});
  refused(R"({"weight_map":{"t":"a","t":"b"}})", {"key 't' is there twice"});
  refused(R"({"weight_map":{"t":"a"},"weight_map":{}})", {"key 'weight_map' is there twice"});
  refused(R"({"weight_map":{}})", {"no tensor in it is named like an expert's"});
}

TEST_F(ShardedWeightsFile, AShardThatIsMalformedIsNamed) {
  write_bytes(folder_ / "bad.safetensors", "12345678{}");
  refused(all_in("bad.safetensors"), {"bad.safetensors", "header of"});
}

// ---- Inputs
// -----------------------------------------------------------------------------------------------------------

/// An inputs file that can be spoilt one tensor at a time.
struct InputsMaker {
  using Add = std::function<void(FileMaker&)>;
  std::map<std::string, Add> tensors;

  InputsMaker() {
    set("hidden_states", [](FileMaker& f) { f.add_bf16("hidden_states", {3, 4}, 1); });
    set("topk_ids", [](FileMaker& f) {
      f.add("topk_ids", DType::kI64, {3, 2}, std::vector<std::int64_t>{0, 5, -1, -1, 2, 2});
    });
    set("topk_weights", [](FileMaker& f) {
      f.add("topk_weights", DType::kF32, {3, 2}, std::vector<float>{0.5f, 0.25f, 1, -1, 0, 2});
    });
  }
  InputsMaker& set(const std::string& name, Add add) {
    tensors[name] = std::move(add);
    return *this;
  }
  InputsMaker& zeros(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
    return set(name, [=](FileMaker& f) { f.add_zeros(name, dtype, shape); });
  }
  InputsMaker& longs(const std::string& name, std::vector<std::int64_t> shape, std::vector<std::int64_t> values) {
    return set(name, [=](FileMaker& f) { f.add(name, DType::kI64, shape, values); });
  }
  InputsMaker& without(const std::string& name) {
    tensors.erase(name);
    return *this;
  }
  FileMaker file() const {
    FileMaker result;
    for (const auto& [name, add] : tensors) add(result);
    return result;
  }
};

class InputsFile : public testing::Test {
 protected:
  LoadedInputs load(const InputsMaker& maker) {
    return load_inputs(maker.file().write(folder_ / "inputs.safetensors"));
  }
  void refused(const InputsMaker& maker, Strings parts) {
    const std::string path = maker.file().write(folder_ / "inputs.safetensors");
    expect_input_error([&] { load_inputs(path); }, parts);
  }
  TempFolder folder_;
};

TEST_F(InputsFile, ForwardInputsLoad) {
  const LoadedInputs loaded = load(InputsMaker());
  EXPECT_EQ(loaded.hidden, 4);
  EXPECT_EQ(loaded.topk, 2);
  EXPECT_EQ(loaded.batch.hidden_states, FileMaker::counting(12, 1));
  EXPECT_EQ(loaded.batch.topk_ids, (std::vector<std::int32_t>{0, 5, -1, -1, 2, 2}));
  EXPECT_EQ(loaded.batch.topk_weights, (std::vector<float>{0.5f, 0.25f, 1, -1, 0, 2}));
  EXPECT_TRUE(loaded.batch.grad_output.empty());
  EXPECT_TRUE(loaded.batch.tokens_per_rank.empty());
}

TEST_F(InputsFile, OptionalTensorsAndInt32IdsLoad) {
  InputsMaker maker;
  maker.set("grad_output", [](FileMaker& f) {
    f.add("grad_output", DType::kF32, {3, 4}, std::vector<float>(12, 0.5f));
  });
  maker.set("topk_ids", [](FileMaker& f) {
    f.add("topk_ids", DType::kI32, {3, 2}, std::vector<std::int32_t>{-1, 0, 1, 2, 3, 2147483647});
  });
  maker.longs("tokens_per_rank", {4}, {0, 2, 0, 1});
  const LoadedInputs loaded = load(maker);
  EXPECT_EQ(loaded.batch.grad_output, std::vector<Bf16>(12, to_bf16(0.5f)));
  EXPECT_EQ(loaded.batch.topk_ids, (std::vector<std::int32_t>{-1, 0, 1, 2, 3, 2147483647}));
  EXPECT_EQ(loaded.batch.tokens_per_rank, (std::vector<std::int64_t>{0, 2, 0, 1}));
}

TEST_F(InputsFile, NoTokensIsLegal) {
  InputsMaker maker;
  maker.zeros("hidden_states", DType::kF16, {0, 8}).zeros("topk_ids", DType::kI32, {0, 2});
  maker.zeros("topk_weights", DType::kF32, {0, 2}).zeros("grad_output", DType::kBf16, {0, 8});
  maker.zeros("tokens_per_rank", DType::kI64, {2});
  const LoadedInputs loaded = load(maker);
  EXPECT_EQ(loaded.hidden, 8);
  EXPECT_EQ(loaded.topk, 2);
  EXPECT_TRUE(loaded.batch.hidden_states.empty());
  EXPECT_EQ(loaded.batch.tokens_per_rank, (std::vector<std::int64_t>{0, 0}));
}

TEST_F(InputsFile, IdsOutOfRangeAreNamedBeforeTheyAreNarrowed) {
  for (const std::int64_t id : {std::int64_t{-2}, std::int64_t{1} << 31, (std::int64_t{1} << 32) + 1,
                                std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
    const std::string holds = std::string("'topk_ids' holds ") + std::to_string(id) + " for token 2, slot 1";
    refused(InputsMaker().longs("topk_ids", {3, 2}, {0, 0, 0, 0, 0, id}), {holds, "allowed: -1"});
  }
}

TEST_F(InputsFile, MissingAndUnknownTensorsAreNamed) {
  refused(InputsMaker().without("hidden_states"), {"'hidden_states' is missing"});
  refused(InputsMaker().without("topk_ids"), {"'topk_ids' is missing"});
  refused(InputsMaker().without("topk_weights"), {"'topk_weights' is missing"});
  refused(InputsMaker().zeros("grad_ouput", DType::kBf16, {3, 4}), {"'grad_ouput' is unknown", "grad_output"});
}

TEST_F(InputsFile, WrongDtypesAreNamed) {
  refused(InputsMaker().zeros("hidden_states", DType::kF64, {3, 4}), {"'hidden_states' is F64", "BF16, F32, F16"});
  refused(InputsMaker().zeros("topk_ids", DType::kI16, {3, 2}), {"'topk_ids' is I16", "I32, I64"});
  refused(InputsMaker().zeros("topk_ids", DType::kF32, {3, 2}), {"'topk_ids' is F32"});
  refused(InputsMaker().zeros("topk_weights", DType::kBf16, {3, 2}), {"'topk_weights' is BF16; allowed: F32"});
  refused(InputsMaker().zeros("grad_output", DType::kF8E4M3, {3, 4}), {"'grad_output' is F8_E4M3"});
  refused(InputsMaker().zeros("tokens_per_rank", DType::kI32, {3}), {"'tokens_per_rank' is I32; allowed: I64"});
}

TEST_F(InputsFile, WrongShapesAreNamed) {
  refused(InputsMaker().zeros("hidden_states", DType::kBf16, {12}), {"'hidden_states' is [12]"});
  refused(InputsMaker().zeros("hidden_states", DType::kBf16, {3, 0}), {"'hidden_states' is [3, 0]", "at least 1"});
  refused(InputsMaker().zeros("topk_ids", DType::kI64, {2, 2}), {"'topk_ids' has 2 rows, hidden_states has 3"});
  refused(InputsMaker().zeros("topk_ids", DType::kI64, {3, 0}), {"'topk_ids' is [3, 0]", "at least 1"});
  refused(InputsMaker().zeros("topk_weights", DType::kF32, {3, 3}), {"'topk_weights' is [3, 3]", "[3, 2]"});
  refused(InputsMaker().zeros("grad_output", DType::kBf16, {3, 5}), {"'grad_output' is [3, 5]", "[3, 4]"});
  refused(InputsMaker().zeros("grad_output", DType::kBf16, {4, 4}), {"'grad_output' has 4 rows"});
  refused(InputsMaker().zeros("tokens_per_rank", DType::kI64, {0}), {"'tokens_per_rank' is [0]"});
  refused(InputsMaker().zeros("tokens_per_rank", DType::kI64, {1, 1}), {"'tokens_per_rank' is [1, 1]"});
}

TEST_F(InputsFile, TokensPerRankThatDoNotSumUpAreRefused) {
  constexpr std::int64_t kBig = std::numeric_limits<std::int64_t>::max();
  refused(InputsMaker().longs("tokens_per_rank", {2}, {1, 1}), {"sums to 2, hidden_states has 3"});
  refused(InputsMaker().longs("tokens_per_rank", {2}, {1, 3}), {"gives rank 1 3 tokens; allowed: 0 to 2"});
  refused(InputsMaker().longs("tokens_per_rank", {2}, {-1, 4}), {"gives rank 0 -1 tokens"});
  refused(InputsMaker().longs("tokens_per_rank", {3}, {kBig, kBig, 5}), {"gives rank 0"});
}

// ---- Outputs
// ----------------------------------------------------------------------------------------------------------

class OutputFile : public testing::Test {
 protected:
  static LayerShape shape(std::int64_t shared) {
    LayerShape result;
    result.hidden = 4;
    result.intermediate = 3;
    result.experts = 2;
    result.topk = 2;
    result.shared_intermediate = shared;
    return result;
  }
  static HostGradients gradients(std::size_t tokens, bool with_shared) {
    HostGradients result;
    result.hidden_states.assign(tokens * 4, to_bf16(1));
    result.topk_weights.assign(tokens * 2, 2);
    result.gate_up.f32.assign(2 * 6 * 4, 3);
    result.down.f32.assign(2 * 4 * 3, 4);
    if (with_shared) {
      result.shared_gate.f32.assign(5 * 4, 5);
      result.shared_up.f32.assign(5 * 4, 6);
      result.shared_down.f32.assign(4 * 5, 7);
    }
    return result;
  }
  void expect_tensor(const io::SafetensorsFile& file, const char* name, std::vector<std::int64_t> shape, DType dtype,
                     float value) {
    const io::TensorInfo* tensor = file.find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(tensor->shape, shape) << name;
    ASSERT_EQ(tensor->dtype, dtype) << name;
    std::vector<Bf16> values(static_cast<std::size_t>(tensor->elements));
    file.read(*tensor, std::span(values));
    EXPECT_EQ(values, std::vector<Bf16>(values.size(), to_bf16(value))) << name;
  }

  TempFolder folder_;
};

TEST_F(OutputFile, ForwardWritesTheOutputAlone) {
  const std::string path = folder_ / "out.safetensors";
  io::save_outputs(path, shape(0), std::vector<Bf16>(12, to_bf16(9)), nullptr);
  const io::SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().size(), 1u);
  expect_tensor(file, "output", {3, 4}, DType::kBf16, 9);
}

TEST_F(OutputFile, BackwardWritesEveryGradient) {
  const std::string path = folder_ / "out.safetensors";
  const HostGradients results = gradients(3, true);
  io::save_outputs(path, shape(5), std::vector<Bf16>(12, to_bf16(9)), &results);
  const io::SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().size(), 8u);
  expect_tensor(file, "output", {3, 4}, DType::kBf16, 9);
  expect_tensor(file, "grad_hidden_states", {3, 4}, DType::kBf16, 1);
  expect_tensor(file, "grad_topk_weights", {3, 2}, DType::kF32, 2);
  expect_tensor(file, "grad_gate_up_proj", {2, 6, 4}, DType::kF32, 3);
  expect_tensor(file, "grad_down_proj", {2, 4, 3}, DType::kF32, 4);
  expect_tensor(file, "grad_shared_gate_proj", {5, 4}, DType::kF32, 5);
  expect_tensor(file, "grad_shared_up_proj", {5, 4}, DType::kF32, 6);
  expect_tensor(file, "grad_shared_down_proj", {4, 5}, DType::kF32, 7);
}

TEST_F(OutputFile, NoTokensAreWrittenAsEmptyTensors) {
  const std::string path = folder_ / "out.safetensors";
  const HostGradients results = gradients(0, false);
  io::save_outputs(path, shape(0), {}, &results);
  const io::SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().size(), 5u);
  expect_tensor(file, "output", {0, 4}, DType::kBf16, 0);
  expect_tensor(file, "grad_topk_weights", {0, 2}, DType::kF32, 0);
}

TEST_F(OutputFile, ResultsThatDoNotFitTheShapeAreNotWritten) {
  const std::string path = folder_ / "out.safetensors";
  expect_input_error([&] { io::save_outputs(path, shape(0), std::vector<Bf16>(11), nullptr); }, {"11 values"});
  HostGradients results = gradients(3, false);
  results.down.f32.pop_back();
  expect_input_error([&] { io::save_outputs(path, shape(0), std::vector<Bf16>(12), &results); }, {"'grad_down_proj'"});
  results.weight_grad_dtype = GradDtype::kBf16;
  expect_input_error([&] { io::save_outputs(path, shape(0), std::vector<Bf16>(12), &results); }, {"BF16"});
  EXPECT_TRUE(folder_.names().empty());
}

TEST_F(OutputFile, APlaceThatCannotBeWrittenIsRefusedBeforeAnyWork) {
  write_bytes(folder_ / "file", "x");
  std::filesystem::create_directory(folder_ / "sub");
  const auto refused = [](const std::string& path, Strings parts) {
    SCOPED_TRACE(path);
    expect_input_error([&] { io::check_writable(path); }, parts);
  };
  refused("", {"empty"});
  refused(folder_ / "absent/out.safetensors", {"there is no folder", "absent"});
  refused(folder_ / "file/out.safetensors", {"there is no folder"});
  refused(folder_ / "sub", {"it is a folder"});
  refused(folder_ / "sub/", {"it is a folder"});
  refused(folder_ / "new/", {"names a folder"});
  refused("/dev/null", {"not a regular file"});
  refused("/proc/out.safetensors", {"cannot be written"});
  refused(folder_ / std::string(300, 'n'), {"cannot be written"});
}

TEST_F(OutputFile, CheckingThatAPlaceCanBeWrittenLeavesNothingBehind) {
  io::check_writable(folder_ / "out.safetensors");
  EXPECT_TRUE(folder_.names().empty());
  write_bytes(folder_ / "out.safetensors", "older");
  io::check_writable(folder_ / "out.safetensors");
  EXPECT_EQ(read_bytes(folder_ / "out.safetensors"), "older");
  EXPECT_EQ(folder_.names().size(), 1u);
}

TEST_F(OutputFile, ALinkIsFollowedAlsoToAFileThatIsNotThereYet) {
  std::filesystem::create_directory(folder_ / "sub");
  std::filesystem::create_symlink("sub/new", folder_ / "link");
  EXPECT_EQ(io::check_writable(folder_ / "link"), io::check_writable(folder_ / "sub/../link"));
  EXPECT_EQ(io::check_writable(folder_ / "link"), io::check_writable(folder_ / "sub/new"));
  io::save_outputs(folder_ / "link", shape(0), std::vector<Bf16>(4), nullptr);
  EXPECT_TRUE(std::filesystem::is_symlink(folder_ / "link"));
  EXPECT_TRUE(std::filesystem::is_regular_file(folder_ / "sub/new"));
  std::filesystem::create_symlink("absent/new", folder_ / "nowhere");
  expect_input_error([&] { io::check_writable(folder_ / "nowhere"); }, {"there is no folder", "absent"});
  std::filesystem::create_symlink("circle", folder_ / "circle");
  expect_input_error([&] { io::check_writable(folder_ / "circle"); }, {"cannot be written"});
}

TEST_F(OutputFile, APlainNameMeansTheCurrentFolder) {
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder_ / ".");
  io::save_outputs("plain.safetensors", shape(0), std::vector<Bf16>(4), nullptr);
  std::filesystem::current_path(before);
  EXPECT_EQ(folder_.names(), std::vector<std::string>{"plain.safetensors"});
}

}  // namespace
}  // namespace moewave::test
