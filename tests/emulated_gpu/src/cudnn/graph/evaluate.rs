//! Tensors of a graph, and operations on their values.
use super::attributes::*;
use crate::blas::DType;
use half::{bf16, f16};
use std::collections::BTreeMap;

/// The dtype of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    BF16 = 9,
    Bool = 11,
}

impl Type {
    fn new(number: i64) -> Option<Self> {
        [Self::F32, Self::F16, Self::I32, Self::BF16, Self::Bool].into_iter().find(|kind| *kind as i64 == number)
    }

    /// In memory; none for those that only virtual tensors may have here.
    fn stored(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            Self::I32 | Self::Bool => None,
        }
    }

    pub(super) fn round(self, value: f64) -> f64 {
        match self {
            Self::F32 => (value as f32).into(),
            Self::F16 => f16::from_f64(value).into(),
            Self::BF16 => bf16::from_f64(value).into(),
            Self::I32 | Self::Bool => value,
        }
    }

    /// # Safety
    /// The element must exist.
    pub(super) unsafe fn read(self, start: u64, index: usize) -> f64 {
        // SAFETY: guaranteed by the caller.
        self.stored().map_or(f64::NAN, |dtype| unsafe { dtype.read(start, index) })
    }
}

/// A tensor of four dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) id: i64,
    pub(super) kind: Type,
    pub(super) sizes: [usize; 4],
    pub(super) strides: [usize; 4],
    pub(super) alignment: u64,
    pub(super) is_virtual: bool,
    pub(super) is_by_value: bool,
}

impl Tensor {
    pub(super) fn new(descriptor: &Descriptor) -> Option<Self> {
        let four = |attribute| -> Option<[usize; 4]> {
            let values = descriptor.values[&attribute].iter();
            let values: Option<Vec<usize>> =
                values.map(|value| usize::try_from(*value).ok().filter(|value| *value > 0)).collect();
            values?.try_into().ok()
        };
        let tensor = Self {
            // cuDNN takes -1 for none, and fails without a message.
            id: Some(descriptor.one(TENSOR_ID)).filter(|id| *id >= 0)?,
            kind: Type::new(descriptor.one(TENSOR_DATA_TYPE))?,
            sizes: four(TENSOR_DIMENSIONS)?,
            strides: four(TENSOR_STRIDES)?,
            alignment: u64::try_from(descriptor.one(TENSOR_ALIGNMENT)).ok()?,
            is_virtual: descriptor.one(TENSOR_IS_VIRTUAL) != 0,
            is_by_value: descriptor.one(TENSOR_IS_BY_VALUE) != 0,
        };
        let is_stored = tensor.is_virtual || tensor.kind.stored().is_some();
        let is_scalar = tensor.is_by_value && tensor.sizes == [1; 4] && !tensor.is_virtual;
        let is_aligned = tensor.alignment.is_power_of_two()
            && tensor.kind.stored().is_none_or(|dtype| tensor.alignment >= dtype.bytes() as u64);
        (is_stored && is_aligned && (is_scalar || !tensor.is_by_value)).then_some(tensor)
    }

    pub(super) fn count(&self) -> usize {
        self.sizes.iter().product()
    }

    /// From the first element to the end of the last.
    pub(super) fn bytes(&self) -> usize {
        let last: usize = self.sizes.iter().zip(self.strides).map(|(size, stride)| (size - 1) * stride).sum();
        (last + 1) * self.kind.stored().map_or(0, DType::bytes)
    }

    /// The size of the dimension whose elements are adjacent.
    pub(super) fn row(&self) -> Option<usize> {
        (0..4).rev().find(|axis| self.strides[*axis] == 1 && self.sizes[*axis] > 1).map(|axis| self.sizes[axis])
    }

    /// The indices of all elements, in the order in which values are kept.
    fn indices(&self) -> impl Iterator<Item = [usize; 4]> + use<> {
        let [a, b, c, d] = self.sizes;
        (0..a * b * c * d).map(move |i| [i / (b * c * d), i / (c * d) % b, i / d % c, i % d])
    }

    fn offset(&self, index: [usize; 4]) -> usize {
        index.iter().zip(self.strides).map(|(index, stride)| index * stride).sum()
    }

    /// Where the value with this index of a larger tensor is kept: a dimension of size 1 is the same for all, and neighbouring heads
    /// may share one.
    fn place(&self, index: [usize; 4], of: [usize; 4]) -> usize {
        let [_, b, c, d] = self.sizes;
        let at: [usize; 4] = std::array::from_fn(|axis| index[axis] / (of[axis] / self.sizes[axis]));
        ((at[0] * b + at[1]) * c + at[2]) * d + at[3]
    }

    /// Whether it can be read with the indices of a tensor of these sizes.
    fn broadcasts(&self, sizes: [usize; 4]) -> bool {
        (0..4).all(|axis| self.sizes[axis] == sizes[axis] || self.sizes[axis] == 1)
    }

    /// # Safety
    /// The tensor must be allocated.
    pub(super) unsafe fn load(&self, address: u64) -> Vec<f64> {
        // SAFETY: guaranteed by the caller.
        self.indices().map(|index| unsafe { self.kind.read(address, self.offset(index)) }).collect()
    }

    /// # Safety
    /// The tensor must be allocated, and nothing else may use it.
    pub(super) unsafe fn store(&self, address: u64, values: &Vec<f64>) {
        for (index, value) in self.indices().zip(values) {
            if let Some(dtype) = self.kind.stored() {
                // SAFETY: guaranteed by the caller.
                unsafe { dtype.write(address, self.offset(index), *value) };
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    AtLeast = 303,
    Index = 501,
    Select = 601,
}

impl Pointwise {
    fn new(number: i64) -> Option<Self> {
        let all = [
            Self::Add,
            Self::Mul,
            Self::Div,
            Self::Sub,
            Self::Exp,
            Self::Log,
            Self::Identity,
            Self::AtLeast,
            Self::Index,
            Self::Select,
        ];
        all.into_iter().find(|mode| *mode as i64 == number)
    }

    /// The number of tensors that it reads.
    fn operands(self) -> usize {
        match self {
            Self::Exp | Self::Log | Self::Identity | Self::Index => 1,
            Self::Select => 3,
            _ => 2,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Operation {
    Pointwise { mode: Mode, inputs: Vec<Tensor>, y: Tensor },
    Product { factors: [Tensor; 2], c: Tensor },
    Reduction { is_sum: bool, x: Tensor, y: Tensor },
    Reshape { x: Tensor, y: Tensor },
}

/// What a pointwise operation does, and the dimension of indices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mode(Pointwise, usize);

impl Operation {
    /// # Safety
    /// The descriptors that it names must exist.
    pub(super) unsafe fn new(descriptor: &Descriptor) -> Option<Self> {
        // SAFETY: guaranteed by the caller.
        let named = |attribute| unsafe { descriptor.named(attribute) };
        let tensor = |attribute| named(attribute).and_then(Tensor::new);
        match descriptor.kind {
            Kind::PointwiseOperation => {
                let of = named(OPERATION_POINTWISE)?;
                let axis = usize::try_from(of.one(POINTWISE_AXIS)).ok().filter(|axis| *axis < 4)?;
                let inputs = [POINTWISE_X, POINTWISE_B, POINTWISE_T].into_iter().filter_map(tensor).collect();
                let mode = Mode(Pointwise::new(of.one(POINTWISE_KIND))?, axis);
                // Comparisons are made in booleans, all else here in f32.
                let precision = if mode.0 == Pointwise::AtLeast { Type::Bool } else { Type::F32 };
                if Type::new(of.one(POINTWISE_PRECISION)) != Some(precision) {
                    return None;
                }
                Some(Self::Pointwise { mode, inputs, y: tensor(POINTWISE_Y)? })
            }
            Kind::MatmulOperation => {
                let is_precise = Type::new(named(OPERATION_MATMUL)?.one(MATMUL_PRECISION)) == Some(Type::F32);
                let factors = [tensor(MATMUL_A)?, tensor(MATMUL_B)?];
                is_precise.then_some(Self::Product { factors, c: tensor(MATMUL_C)? })
            }
            Kind::ReductionOperation => {
                let of = named(OPERATION_REDUCTION)?;
                let is_sum = match of.one(REDUCTION_KIND) {
                    0 => true,
                    3 => false,
                    _ => return None,
                };
                let is_precise = Type::new(of.one(REDUCTION_PRECISION)) == Some(Type::F32);
                is_precise.then_some(Self::Reduction { is_sum, x: tensor(REDUCTION_X)?, y: tensor(REDUCTION_Y)? })
            }
            Kind::ReshapeOperation => Some(Self::Reshape { x: tensor(RESHAPE_X)?, y: tensor(RESHAPE_Y)? }),
            _ => None,
        }
    }

    pub(super) fn inputs(&self) -> impl Iterator<Item = &Tensor> {
        match self {
            Self::Pointwise { inputs, .. } => inputs.iter(),
            Self::Product { factors, .. } => factors.iter(),
            Self::Reduction { x, .. } | Self::Reshape { x, .. } => std::slice::from_ref(x).iter(),
        }
    }

    pub(super) fn output(&self) -> &Tensor {
        match self {
            Self::Pointwise { y, .. } | Self::Reduction { y, .. } | Self::Reshape { y, .. } => y,
            Self::Product { c, .. } => c,
        }
    }

    /// Whether the tensor, which is stored, is only converted.
    pub(super) fn is_conversion(&self) -> bool {
        matches!(self, Self::Pointwise { mode: Mode(Pointwise::Identity, _), inputs, .. } if !inputs[0].is_virtual)
    }

    pub(super) fn is_product(&self) -> bool {
        matches!(self, Self::Product { .. })
    }

    /// Whether the sizes and dtypes belong together.
    pub(super) fn fits(&self) -> bool {
        match self {
            Self::Pointwise { mode: Mode(mode, axis), inputs, y } => {
                let kind = match mode {
                    Pointwise::AtLeast => y.kind == Type::Bool,
                    Pointwise::Index => y.kind == Type::I32 && *axis >= 2,
                    Pointwise::Select => inputs.get(2).is_some_and(|t| t.kind == Type::Bool),
                    _ => inputs.iter().all(|input| !matches!(input.kind, Type::I32 | Type::Bool)),
                };
                kind && inputs.len() == mode.operands() && inputs.iter().all(|input| input.broadcasts(y.sizes))
            }
            Self::Product { factors: [a, b], c } => {
                let shares = |of: &Tensor| c.sizes[0] == of.sizes[0] && c.sizes[1].is_multiple_of(of.sizes[1]);
                shares(a)
                    && shares(b)
                    && [a.sizes[2], b.sizes[3]] == c.sizes[2..]
                    && a.sizes[3] == b.sizes[2]
                    && [a.kind, b.kind].iter().all(|kind| matches!(kind, Type::F16 | Type::BF16 | Type::F32))
            }
            Self::Reduction { x, y, .. } => (0..4).all(|axis| x.sizes[axis].is_multiple_of(y.sizes[axis])),
            Self::Reshape { x, y } => {
                // The same dimensions in another order: all elements' offsets would be as many as a step's scores.
                let axes = |tensor: &Tensor| {
                    let axes = (0..4).filter(|axis| tensor.sizes[*axis] > 1);
                    let mut axes: Vec<_> = axes.map(|axis| (tensor.strides[axis], tensor.sizes[axis])).collect();
                    axes.sort_unstable();
                    axes
                };
                axes(x) == axes(y)
            }
        }
    }

    /// The values of the output.
    pub(super) fn evaluate(&self, values: &BTreeMap<i64, Vec<f64>>) -> Vec<f64> {
        match self {
            Self::Pointwise { mode: Mode(mode, axis), inputs, y } => {
                let one = |index: [usize; 4]| {
                    let at = |input: usize| values[&inputs[input].id][inputs[input].place(index, y.sizes)];
                    match mode {
                        Pointwise::Add => at(0) + at(1),
                        Pointwise::Mul => at(0) * at(1),
                        Pointwise::Div => at(0) / at(1),
                        Pointwise::Sub => at(0) - at(1),
                        Pointwise::Exp => at(0).exp(),
                        Pointwise::Log => at(0).ln(),
                        Pointwise::Identity => at(0),
                        Pointwise::AtLeast => f64::from(at(0) >= at(1)),
                        Pointwise::Index => index[*axis] as f64,
                        Pointwise::Select => at(if at(2) != 0.0 { 0 } else { 1 }),
                    }
                };
                y.indices().map(one).collect()
            }
            Self::Product { factors: [a, b], c } => {
                let (first, second) = (&values[&a.id], &values[&b.id]);
                let (inner, columns) = (a.sizes[3], b.sizes[3]);
                let mut sums = vec![0.0; c.count()];
                for ([batch, head, row, _], sums) in c.indices().step_by(columns).zip(sums.chunks_exact_mut(columns)) {
                    let heads = |of: &Tensor| batch * of.sizes[1] + head / (c.sizes[1] / of.sizes[1]);
                    let (a, b) = ((heads(a) * a.sizes[2] + row) * inner, heads(b) * inner * columns);
                    for (k, factor) in first[a..][..inner].iter().enumerate() {
                        for (sum, value) in sums.iter_mut().zip(&second[b + k * columns..][..columns]) {
                            *sum += factor * value;
                        }
                    }
                }
                sums
            }
            Self::Reduction { is_sum, x, y } => {
                let mut found = vec![if *is_sum { 0.0 } else { f64::NEG_INFINITY }; y.count()];
                for (index, value) in x.indices().zip(&values[&x.id]) {
                    let found = &mut found[y.place(index, x.sizes)];
                    *found = if *is_sum { *found + value } else { found.max(*value) };
                }
                found
            }
            Self::Reshape { x, y } => {
                let at: BTreeMap<usize, f64> =
                    x.indices().map(|index| x.offset(index)).zip(values[&x.id].iter().copied()).collect();
                y.indices().map(|index| at[&y.offset(index)]).collect()
            }
        }
    }
}
