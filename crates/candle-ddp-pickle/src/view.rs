//! Tensors as pickles describe them: as views of storages.
use crate::checked::Checked;
use crate::reader::{Id, Pickle, Value};
use candle_core::DType;

/// The largest number of dimensions: PyTorch's own limit for most operations.
const MOST_DIMENSIONS: usize = 64;

/// The longest key of a storage. PyTorch numbers them.
const LONGEST_KEY: usize = 255;

/// A tensor's view of a storage: `torch.as_strided`'s arguments, in elements.
pub(crate) struct View<'a> {
    pub(crate) storage: &'a str,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    offset: usize,
    strides: Vec<usize>,
}

/// The extent of a view in its storage, in elements.
pub(crate) struct Extent {
    pub(crate) start: usize,
    /// The position after the last element.
    pub(crate) end: usize,
    /// The number of elements in the view.
    pub(crate) count: usize,
    /// Whether the elements are contiguous in the storage.
    pub(crate) is_contiguous: bool,
}

impl<'a> View<'a> {
    /// The tensor that the value `id` describes, if it describes one.
    pub(crate) fn of(pickle: &Pickle<'a>, id: Id) -> Checked<Option<Self>> {
        let Value::Object { mut callable, mut args } = pickle[id] else { return Ok(None) };
        // A tensor may be wrapped, as a parameter or a subclass, possibly more than once, but not often.
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
                    return Self::of_storage(pickle, None, [*storage, *offset, *shape, *strides]).map(Some);
                }
                // A dtype that is newer than the storage classes.
                (
                    "torch._utils",
                    "_rebuild_tensor_v3",
                    [storage, offset, shape, strides, _, _, dtype, further @ ..],
                ) => {
                    if let Some(metadata) = further.first() {
                        check_metadata(pickle, *metadata)?;
                    }
                    let dtype = match pickle[*dtype] {
                        Value::Class { module: "torch", name: "uint32" } => DType::U32,
                        Value::Class { module: "torch", name: "float8_e4m3fn" } => DType::F8E4M3,
                        Value::Class { module, name } => {
                            return Err(format!("candle has no dtype for {module}.{name}"));
                        }
                        _ => return Err(damaged()),
                    };
                    return Self::of_storage(pickle, Some(dtype), [*storage, *offset, *shape, *strides]).map(Some);
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

    /// Without a `dtype`, the storage's class determines it.
    fn of_storage(pickle: &Pickle<'a>, dtype: Option<DType>, arguments: [Id; 4]) -> Checked<Self> {
        let [storage, offset, shape, strides] = arguments;
        let Value::Persistent(storage) = pickle[storage] else { return Err(damaged()) };
        let Value::Tuple(storage) = &pickle[storage] else { return Err(damaged()) };
        let [_, class, key, ..] = storage.as_slice() else { return Err(damaged()) };
        let (Value::Class { name, .. }, Value::Text(key)) = (&pickle[*class], &pickle[*key]) else {
            return Err(damaged());
        };
        if key.len() > LONGEST_KEY {
            return Err(damaged());
        }
        let dtype = match (dtype, *name) {
            (Some(dtype), _) => dtype,
            (None, "FloatStorage") => DType::F32,
            (None, "DoubleStorage") => DType::F64,
            (None, "HalfStorage") => DType::F16,
            (None, "BFloat16Storage") => DType::BF16,
            (None, "ByteStorage" | "BoolStorage") => DType::U8,
            (None, "ShortStorage") => DType::I16,
            (None, "IntStorage") => DType::I32,
            (None, "LongStorage") => DType::I64,
            (None, other) => return Err(format!("candle has no dtype for {other}")),
        };
        let number = |id: Id| match pickle[id] {
            Value::Int(value) => usize::try_from(value).map_err(|_| damaged()),
            _ => Err(damaged()),
        };
        let numbers = |id: Id| match &pickle[id] {
            Value::Tuple(values) if values.len() > MOST_DIMENSIONS => {
                Err(format!("it has {} dimensions, more than {MOST_DIMENSIONS}", values.len()))
            }
            Value::Tuple(values) => values.iter().map(|value| number(*value)).collect::<Checked<Vec<_>>>(),
            _ => Err(damaged()),
        };
        let (offset, shape, strides) = (number(offset)?, numbers(shape)?, numbers(strides)?);
        if shape.len() != strides.len() {
            return Err(damaged());
        }
        Ok(Self { storage: key, dtype, shape, offset, strides })
    }

    /// The approximate memory of a view and its tensor, without the values.
    pub(crate) fn description_bytes(&self) -> u64 {
        512 + 32 * self.shape.len() as u64
    }

    /// Its extent in a storage of `held` bytes. The tensor may have `limit` bytes.
    pub(crate) fn extent(&self, held: u64, limit: u64) -> Checked<Extent> {
        let size = self.dtype.size_in_bytes();
        // candle multiplies dimensions without overflow checks, even if one of them is zero.
        let all = self.shape.iter().try_fold(1usize, |all, dim| all.checked_mul((*dim).max(1)));
        let count = if self.shape.contains(&0) { all.map(|_| 0) } else { all };
        let length = count.and_then(|count| count.checked_mul(size)).filter(|length| *length as u64 <= limit);
        let (Some(count), Some(_)) = (count, length) else {
            return Err(format!("its shape {:?} is larger than the file", self.shape));
        };
        if count == 0 {
            return Ok(Extent { start: 0, end: 0, count, is_contiguous: true });
        }
        // From the first element to the last.
        let reach = self.shape.iter().zip(&self.strides).try_fold(1usize, |reach, (dim, stride)| {
            (dim - 1).checked_mul(*stride).and_then(|further| reach.checked_add(further))
        });
        let end = reach.and_then(|reach| reach.checked_add(self.offset)).ok_or_else(damaged)?;
        if end.checked_mul(size).is_none_or(|end| end as u64 > held) {
            return Err(format!("it lies outside its storage, which has {held} bytes"));
        }
        Ok(Extent { start: self.offset, end, count, is_contiguous: self.is_contiguous() })
    }

    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim <= 1 || stride == expected;
            expected *= dim.max(1);
            fits
        })
    }

    /// The elements in the order of their indices, of a view that is not empty; `bytes` begin with the first.
    pub(crate) fn gather(&self, bytes: &[u8], count: usize) -> Vec<u8> {
        let size = self.dtype.size_in_bytes();
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

/// Metadata may say that a tensor's values are its storage's, negated or conjugated.
fn check_metadata(pickle: &Pickle, metadata: Id) -> Checked<()> {
    let names: Vec<&str> = match &pickle[metadata] {
        Value::None => return Ok(()),
        Value::Dict(entries) if entries.is_empty() => return Ok(()),
        Value::Dict(entries) => entries.iter().take(4).filter_map(|(name, _)| pickle.text(*name)).collect(),
        _ => Vec::new(),
    };
    let names = names.join(", ");
    Err(format!("its values differ from its storage's by {names}: save `tensor.resolve_neg().resolve_conj()`"))
}

fn damaged() -> String {
    "its description is damaged".to_string()
}
