#include "fsdp/state/named_values.h"

#include <map>

namespace fsdp {

NamedValues ReadNamedValues(const ShardedModel& model,
                            const torch::nn::Module& module) {
  std::map<const void*, ShardedValue> places;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      for (int i = 0; i < flat->num_parameters(); ++i) {
        for (const at::Tensor& tensor : flat->parameter(i).tensors) {
          places[tensor.unsafeGetTensorImpl()] = {unit, flat.get(), i};
        }
      }
    }
  }
  std::map<const void*, c10::ScalarType> originals;
  for (const BufferPrecision::Buffer& buffer :
       model.precision().buffers().buffers()) {
    originals[buffer.tensor.unsafeGetTensorImpl()] = buffer.original;
  }
  NamedValues values;
  for (const auto& item : module.named_parameters()) {
    const auto place = places.find(item.value().unsafeGetTensorImpl());
    if (place != places.end()) {
      values.parameters.push_back({item.key(), place->second});
    } else {
      values.others.push_back({item.key(), item.value(),
                               item.value().scalar_type(),
                               /*is_buffer=*/false});
    }
  }
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) continue;
    const auto original = originals.find(item.value().unsafeGetTensorImpl());
    values.others.push_back({item.key(), item.value(),
                             original == originals.end()
                                 ? item.value().scalar_type()
                                 : original->second,
                             /*is_buffer=*/true});
  }
  return values;
}

}  // namespace fsdp
