// Memory that the caller already shares between all ranks.
#include <cstdint>
#include <string>
#include <utility>

#include "layer/plural.h"
#include "moewave/communicator.h"
#include "moewave/error.h"
#include "transport/together.h"

namespace moewave {
namespace {

constexpr std::uintptr_t kAlignment = 256;

class AdoptedCommunicator final : public Communicator {
 public:
  AdoptedCommunicator(std::span<const AdoptedRank> ranks, std::int64_t bytes, std::shared_ptr<ProcessGroup> group)
      : bytes_(bytes) {
    std::vector<int> devices;
    for (const AdoptedRank& rank : ranks) {
      devices.push_back(rank.device);
      bases_.push_back(rank.bases);
    }
    describe(devices, std::move(group));
    together(processes(), [&] { check_bases(); });
  }

  std::unique_ptr<SharedMemory> allocate(std::int64_t bytes) override {
    together(processes(), [&] {
      if (bytes > bytes_) {
        throw InputError("the adopted memory has " + plural(bytes_, "byte") + " a rank; this layer needs " +
                         std::to_string(bytes));
      }
      if (is_taken_) throw InputError("the adopted memory carries another layer; it carries one at a time");
    });
    return std::make_unique<Loan>(*this);
  }

 private:
  class Loan final : public SharedMemory {
   public:
    explicit Loan(AdoptedCommunicator& owner) : owner_(owner) { owner_.is_taken_ = true; }
    ~Loan() override { owner_.is_taken_ = false; }
    const std::vector<void*>& bases(std::size_t index) const override { return owner_.bases_[index]; }

   private:
    AdoptedCommunicator& owner_;
  };

  void check_bases() const {
    for (std::size_t index = 0; index < bases_.size(); ++index) {
      const std::string who = "adopted memory of rank " + std::to_string(local()[index].rank);
      if (bases_[index].size() != static_cast<std::size_t>(size())) {
        throw InputError(who + " names " + plural(bases_[index].size(), "rank") + "; it must name all " +
                         std::to_string(size()));
      }
      for (std::size_t peer = 0; peer < bases_[index].size(); ++peer) {
        const auto address = reinterpret_cast<std::uintptr_t>(bases_[index][peer]);
        if (address != 0 && address % kAlignment == 0) continue;
        throw InputError(who + ": the address of rank " + std::to_string(peer) + " is " + std::to_string(address) +
                         "; it must be a multiple of " + std::to_string(kAlignment) + " and not 0");
      }
    }
  }

  std::int64_t bytes_;
  std::vector<std::vector<void*>> bases_;  // [local ranks][size]
  bool is_taken_ = false;
};

}  // namespace

std::shared_ptr<Communicator> adopt_memory(std::span<const AdoptedRank> ranks, std::int64_t bytes,
                                           std::shared_ptr<ProcessGroup> processes) {
  if (processes == nullptr) processes = join_process_group({});
  return std::make_shared<AdoptedCommunicator>(ranks, bytes, std::move(processes));
}

}  // namespace moewave
