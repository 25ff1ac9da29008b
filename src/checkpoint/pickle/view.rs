//! Tensors as pickles describe them: as views of storages.
use super::reader::{Id, Pickle, Value};
use super::{CPU, Checked};
use candle_core::{DType, Tensor};

/// What a tensor shows of a storage: `torch.as_strided`'s arguments, in elements.
pub(super) struct View {
    pub(super) storage: String,
    dtype: DType,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl View {
    /// The tensor that the value `id` is, if it is one.
    pub(super) fn of(pickle: &Pickle, id: Id) -> Checked<Option<Self>> {
        let Value::Object { mut callable, mut args } = pickle[id] else { return Ok(None) };
        // A tensor may be wrapped, as a parameter or with a subclass, and that again, but not often.
        for _ in 0..8 {
            let (Value::Class { module, name }, Value::Tuple(items)) = (&pickle[callable], &pickle[args]) else {
                return Ok(None);
            };
            match (*module, *name, items.as_slice()) {
                ("torch._utils", "_rebuild_tensor_v2", [storage, offset, shape, strides, further @ ..]) => {
                    // After `requires_grad` and `backward_hooks`.
                    if let Some(metadata) = further.get(2) {
                        check_metadata(pickle, *metadata)?;
                    }
                    return Self::of_storage(pickle, *storage, *offset, *shape, *strides).map(Some);
                }
                ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state", [tensor, ..]) => {
                    let Value::Object { callable: inner, args: inner_args } = pickle[*tensor] else { return Ok(None) };
                    (callable, args) = (inner, inner_args);
                }
                ("torch._tensor", "_rebuild_from_type_v2", [inner, _, inner_args, ..]) => {
                    (callable, args) = (*inner, *inner_args);
                }
                ("torch._utils" | "torch._tensor", kind, _) if kind.starts_with("_rebuild") => {
                    return Err(format!("it is a tensor of a kind that cannot be read ({kind})"));
                }
                _ => return Ok(None),
            }
        }
        Err(damaged())
    }

    fn of_storage(pickle: &Pickle, storage: Id, offset: Id, shape: Id, strides: Id) -> Checked<Self> {
        let Value::Persistent(storage) = pickle[storage] else { return Err(damaged()) };
        let Value::Tuple(storage) = &pickle[storage] else { return Err(damaged()) };
        let [_, class, key, ..] = storage.as_slice() else { return Err(damaged()) };
        let (Value::Class { name, .. }, Value::Text(key)) = (&pickle[*class], &pickle[*key]) else {
            return Err(damaged());
        };
        let dtype = match *name {
            "FloatStorage" => DType::F32,
            "DoubleStorage" => DType::F64,
            "HalfStorage" => DType::F16,
            "BFloat16Storage" => DType::BF16,
            "ByteStorage" | "BoolStorage" => DType::U8,
            "ShortStorage" => DType::I16,
            "IntStorage" => DType::I32,
            "LongStorage" => DType::I64,
            other => return Err(format!("candle has no dtype for {other}")),
        };
        let number = |id: Id| match pickle[id] {
            Value::Int(value) => usize::try_from(value).map_err(|_| damaged()),
            _ => Err(damaged()),
        };
        let numbers = |id: Id| match &pickle[id] {
            Value::Tuple(values) => values.iter().map(|value| number(*value)).collect::<Checked<Vec<_>>>(),
            _ => Err(damaged()),
        };
        let (offset, shape, strides) = (number(offset)?, numbers(shape)?, numbers(strides)?);
        if shape.len() != strides.len() {
            return Err(damaged());
        }
        Ok(Self { storage: key.to_string(), dtype, offset, shape, strides })
    }

    /// The tensor, contiguous, of at most `limit` bytes.
    pub(super) fn read(&self, storage: &[u8], limit: u64) -> Checked<Tensor> {
        let size = self.dtype.size_in_bytes();
        // candle multiplies dimensions without looking, also where one of them is zero.
        let all = self.shape.iter().try_fold(1usize, |all, dim| all.checked_mul((*dim).max(1)));
        let count = if self.shape.contains(&0) { all.map(|_| 0) } else { all };
        let length = count.and_then(|count| count.checked_mul(size)).filter(|length| *length as u64 <= limit);
        let (Some(count), Some(_)) = (count, length) else {
            return Err(format!("its shape {:?} is larger than the file", self.shape));
        };
        // The bytes from the first element to the last.
        let reach = self.shape.iter().zip(&self.strides).try_fold(1usize, |reach, (dim, stride)| {
            dim.saturating_sub(1).checked_mul(*stride).and_then(|further| reach.checked_add(further))
        });
        let end = reach.filter(|_| count > 0).unwrap_or(0).checked_add(self.offset);
        let range = match (self.offset.checked_mul(size), end.and_then(|end| end.checked_mul(size))) {
            (Some(start), Some(end)) if reach.is_some() || count == 0 => start..end,
            _ => return Err(damaged()),
        };
        let held = storage.len();
        let bytes = if count == 0 { Some(&storage[..0]) } else { storage.get(range) };
        let bytes = bytes.ok_or_else(|| format!("it lies outside of its storage, which has {held} bytes"))?;
        let made = if self.is_contiguous() {
            Tensor::from_raw_buffer(bytes, self.dtype, &self.shape, &CPU)
        } else {
            Tensor::from_raw_buffer(&self.gather(bytes, count, size), self.dtype, &self.shape, &CPU)
        };
        made.map_err(|error| error.to_string())
    }

    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim <= 1 || stride == expected;
            expected *= dim.max(1);
            fits
        })
    }

    /// The elements in the order of their indices; `bytes` begin with the first.
    fn gather(&self, bytes: &[u8], count: usize, size: usize) -> Vec<u8> {
        let mut gathered = Vec::with_capacity(count * size);
        let mut index = vec![0usize; self.shape.len()];
        for _ in 0..count {
            let element: usize = index.iter().zip(&self.strides).map(|(index, stride)| index * stride).sum();
            gathered.extend_from_slice(&bytes[element * size..][..size]);
            for (index, dim) in index.iter_mut().zip(&self.shape).rev() {
                *index += 1;
                if *index < *dim {
                    break;
                }
                *index = 0;
            }
        }
        gathered
    }
}

/// Metadata says that the values of a tensor differ from those of its storage: negated, or conjugated.
fn check_metadata(pickle: &Pickle, metadata: Id) -> Checked<()> {
    let names: Vec<&str> = match &pickle[metadata] {
        Value::None => return Ok(()),
        Value::Dict(entries) if entries.is_empty() => return Ok(()),
        Value::Dict(entries) => entries.iter().filter_map(|(name, _)| pickle.text(*name)).collect(),
        _ => Vec::new(),
    };
    let names = names.join(", ");
    Err(format!("its values are not those of its storage ({names}): save `tensor.resolve_neg().resolve_conj()`"))
}

fn damaged() -> String {
    "its description is damaged".to_string()
}
