// Launch plans as no planner makes them: the reader refuses them or reads them, and stays inside.
#include <cstdint>
#include <limits>
#include <random>

#include "check.h"
#include "ffi_frame.h"
#include "launch_plan.h"

namespace {

std::map<std::string, Attribute> GoodPlan() {
  const auto buffer = Attribute::Members(
      {{"buffer", Attribute::Number(0)}, {"offset_bytes", Attribute::Number(0)}});
  const auto stepping = Attribute::Members({{"buffer", Attribute::Number(1)},
                                            {"offset_bytes", Attribute::Number(16)},
                                            {"steps_bytes", Attribute::Numbers({96, 0})}});
  const auto scalars = Attribute::Members({{"bytes", Attribute::Bytes({1, 2, 3, 4})}});
  const auto map = Attribute::Members({{"buffer", Attribute::Number(1)},
                                       {"offset_bytes", Attribute::Number(0)},
                                       {"box", Attribute::Numbers({64, 32})},
                                       {"dtype", Attribute::Number(9)},
                                       {"element_strides", Attribute::Numbers({1, 1})},
                                       {"extent_bytes", Attribute::Number(13304)},
                                       {"interleave", Attribute::Number(0)},
                                       {"l2_promotion", Attribute::Number(3)},
                                       {"oob_fill", Attribute::Number(0)},
                                       {"sizes", Attribute::Numbers({100, 64})},
                                       {"steps_bytes", Attribute::Numbers({0, 13312})},
                                       {"strides_bytes", Attribute::Numbers({208})},
                                       {"swizzle", Attribute::Number(3)}});
  const auto launch = Attribute::Members(
      {{"block", Attribute::Numbers({128, 1, 1})},
       {"cluster", Attribute::Numbers({1, 1, 1})},
       {"cubin", Attribute::Number(1)},
       {"entry", Attribute::Text("_Z6kernel")},
       {"grid", Attribute::Numbers({4, 2, 1})},
       {"parameters",
        Attribute::Members({{"0", buffer}, {"1", scalars}, {"2", map}, {"3", stepping}})},
       {"repeats", Attribute::Numbers({3, 5})},
       {"shared_memory_bytes", Attribute::Number(1024)}});
  const auto overlapping = Attribute::Members({{"block", Attribute::Numbers({128, 1, 1})},
                                               {"cluster", Attribute::Numbers({1, 1, 1})},
                                               {"cubin", Attribute::Number(0)},
                                               {"entry", Attribute::Text("_Z6kernel")},
                                               {"grid", Attribute::Numbers({4, 2, 1})},
                                               {"overlaps", Attribute::Number(1)},
                                               {"parameters", Attribute::Members({})},
                                               {"shared_memory_bytes", Attribute::Number(0)}});
  auto branching = overlapping, joining = overlapping;
  branching.members.erase("overlaps");
  joining.members.erase("overlaps");
  branching.members["branches"] = joining.members["joins"] = Attribute::Number(1);
  const auto exchange = Attribute::Members({{"axis", Attribute::Text("x")},
                                            {"device", Attribute::Number(1)},
                                            {"ends", Attribute::Numbers({1, 2, 4, 5})},
                                            {"keeps", Attribute::Number(0)},
                                            {"lhs", Attribute::Number(0)},
                                            {"out", Attribute::Number(1)},
                                            {"receive", Attribute::Number(1)},
                                            {"rows", Attribute::Numbers({3, 2})},
                                            {"scatters", Attribute::Number(1)},
                                            {"send", Attribute::Number(1)},
                                            {"size", Attribute::Number(2)},
                                            {"stride", Attribute::Number(1)}});
  return {
      {"exchange", exchange},
      {"alignments", Attribute::Numbers({16, 4})},
      {"arch", Attribute::Text("sm_90a")},
      {"cubins",
       Attribute::Members({{"0", Attribute::Bytes({1})}, {"1", Attribute::Bytes({2, 3})}})},
      {"launches",
       Attribute::Members(
           {{"0", launch}, {"1", launch}, {"2", overlapping}, {"3", branching}, {"4", joining}})},
      {"name", Attribute::Text("example")}};
}

// What the reader says; the plan it reads is looked at in full.
std::string Read(const std::map<std::string, Attribute>& attributes) {
  const EncodedAttributes encoded(attributes);
  const auto plan = tilekern::ReadLaunchPlan(xla::ffi::Dictionary(&encoded.get()));
  if (!plan.has_value()) return plan.error().message();
  std::string seen = plan->Text();
  for (const tilekern::Launch& launch : plan->launches) {
    seen += launch.Text() + std::string(plan->cubins.at(launch.cubin));
    for (uint64_t repeats : launch.repeats) seen += std::to_string(repeats);
  }
  return seen.empty() ? "no text" : std::string();
}

// Every attribute of a tree, the tree's own included.
void Collect(std::map<std::string, Attribute>& attributes,
             std::vector<std::pair<std::map<std::string, Attribute>*, std::string>>& found) {
  for (auto& [name, attribute] : attributes) {
    found.emplace_back(&attributes, name);
    Collect(attribute.members, found);
  }
}

Attribute Replacement(int choice) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  switch (choice) {
    case 0:
      return Attribute::Number(-1);
    case 1:
      return Attribute::Number(kMost);
    case 2:
      return Attribute::Number(int64_t{1} << 32);
    case 3:
      return Attribute::Numbers({});
    case 4:
      return Attribute::Numbers({kMost, -kMost, 0, 1});
    case 5:
      return Attribute::Numbers(std::vector<int64_t>(1000, 7));
    case 6:
      return Attribute::Bytes({});
    case 7:
      return Attribute::Text("");
    case 8:
      return Attribute::Text(std::string(5000, 'x'));
    case 9:
      return Attribute::Real();
    case 10:
      return Attribute::Members({});
    case 11:
      return Attribute::Members({{"0", Attribute::Number(3)}, {"x", Attribute::Text("y")}});
    default:
      return Attribute::Numbers({0, 0, 0});
  }
}
constexpr int kReplacements = 13;

}  // namespace

void CheckHostilePlans(Counts& counts) {
  counts.Check(Read(GoodPlan()).empty(), "a good plan is read: " + Read(GoodPlan()));
  counts.Check(!Read({}).empty(), "no attributes at all are refused");

  using Change = std::pair<const char*, Attribute>;
  for (const auto& [name, value] :
       {Change{"repeats", Attribute::Numbers({3, 0})},
        Change{"repeats", Attribute::Numbers({3, -5})}, Change{"repeats", Attribute::Numbers({15})},
        Change{"repeats", Attribute::Numbers({3, 5, 1})}}) {
    auto repeated = GoodPlan();
    repeated["launches"].members["1"].members[name] = value;
    counts.Check(!Read(repeated).empty(), "repeats that are none, or not as many as steps");
  }
  auto first = GoodPlan();
  first["launches"].members["0"].members["overlaps"] = Attribute::Number(1);
  counts.Check(!Read(first).empty(), "a first launch that overlaps is refused");
  auto twice = GoodPlan();
  twice["launches"].members["2"].members["overlaps"] = Attribute::Number(2);
  counts.Check(!Read(twice).empty(), "a launch whose overlap is not 1 is refused");
  for (const char* launch : {"3", "4"}) {
    auto both = GoodPlan();
    auto& members = both["launches"].members[launch].members;
    members["branches"] = members["joins"] = Attribute::Number(1);
    counts.Check(!Read(both).empty(), "a launch that branches and joins is refused");
    auto overlapping = GoodPlan();
    overlapping["launches"].members[launch].members["overlaps"] = Attribute::Number(1);
    counts.Check(!Read(overlapping).empty(),
                 "a launch that joins, or the first that branches, cannot overlap");
  }
  for (const auto& [name, number] : std::map<std::string, int64_t>{
           {"size", 0}, {"stride", 0}, {"addend", 2}, {"lhs", 2}, {"receive", 2}, {"send", -1}}) {
    auto exchanging = GoodPlan();
    exchanging["exchange"].members[name] = Attribute::Number(number);
    counts.Check(!Read(exchanging).empty(), "an exchange whose " + name + " cannot be is refused");
  }
  for (const auto& [name, numbers] :
       std::multimap<std::string, Attribute>{{"rows", Attribute::Numbers({})},
                                             {"rows", Attribute::Numbers({3, 0})},
                                             {"rows", Attribute::Numbers({3})},
                                             {"rows", Attribute::Numbers({3, int64_t{1} << 39})},
                                             {"ends", Attribute::Numbers({})},
                                             {"ends", Attribute::Numbers({1, 2, 4, 6})},
                                             {"ends", Attribute::Numbers({1, 4, 2, 5})},
                                             {"ends", Attribute::Numbers({1, 2, 5})}}) {
    auto exchanging = GoodPlan();
    exchanging["exchange"].members[name] = numbers;
    counts.Check(!Read(exchanging).empty(), "an exchange whose " + name + " cannot be is refused");
  }
  for (const int64_t cubin : {-1, 2}) {
    auto absent = GoodPlan();
    absent["launches"].members["1"].members["cubin"] = Attribute::Number(cubin);
    counts.Check(!Read(absent).empty(), "a launch of a cubin that is not there is refused");
  }
  for (const auto& steps :
       {Attribute::Numbers({96}), Attribute::Numbers({96, -1}), Attribute::Numbers({})}) {
    for (const char* parameter : {"2", "3"}) {
      auto stepping = GoodPlan();
      auto& parameters = stepping["launches"].members["0"].members["parameters"].members;
      parameters[parameter].members["steps_bytes"] = steps;
      counts.Check(!Read(stepping).empty(), "steps that are negative, or not one for each repeat");
    }
  }

  std::vector<std::pair<std::map<std::string, Attribute>*, std::string>> places;
  std::map<std::string, Attribute> plan = GoodPlan();
  Collect(plan, places);
  const size_t count = places.size();
  for (size_t i = 0; i < count; ++i) {
    for (int choice = -1; choice < kReplacements; ++choice) {
      plan = GoodPlan();
      places.clear();
      Collect(plan, places);
      const auto& [parent, name] = places[i];
      const bool is_member = name.size() == 1 && name >= "0" && name <= "4";
      const bool is_kind = name == "sizes" || name == "bytes";
      if (choice < 0) {
        parent->erase(name);
      } else {
        (*parent)[name] = Replacement(choice);
      }
      const std::string said = Read(plan);
      // Lists may be shorter, and what is missing may make a parameter one of another kind, or of
      // one that stays while its launch is repeated, or a launch one that waits for all before it.
      const bool is_optional = name == "steps_bytes" || name == "overlaps" || name == "branches" ||
                               name == "joins" || name == "exchange";
      if (choice < 0 && !is_member && !is_kind && !is_optional) {
        counts.Check(!said.empty(), "a plan without " + name + " is refused");
      } else if (choice == 9) {
        counts.Check(!said.empty(), "a number with a point for " + name + " is refused");
      } else {
        ++counts.passed;  // read or refused, but not out of bounds
      }
    }
  }

  std::mt19937 random(1);
  const int rounds = 5000;
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    plan = GoodPlan();
    for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
      places.clear();
      Collect(plan, places);
      if (places.empty()) break;
      const auto& [parent, name] = places[random() % places.size()];
      if (random() % 4 == 0) {
        parent->erase(name);
      } else {
        (*parent)[name] = Replacement(static_cast<int>(random() % kReplacements));
      }
    }
    refused += !Read(plan).empty();
  }
  counts.Check(refused > rounds / 2, "most random plans are refused");
  std::printf("launch plans: %zu attributes damaged %d ways; of %d random plans %d refused\n",
              count, kReplacements + 1, rounds, refused);
}
