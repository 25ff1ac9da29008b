//! A graph of operations on tensors of four dimensions, for which cuDNN may have a kernel.
use super::backend::{Descriptor, Failure, Value};
use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind, cudnnBackendHeurMode_t as Mode,
    cudnnDataType_t as Type, cudnnHandle_t, cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t,
};
use std::rc::Rc;

type Outcome<T> = std::result::Result<T, Failure>;

/// The kind of an operation, under the name of its attribute.
type Of<'a> = (Name, Kind, &'a [(Name, Value<'a>)]);

/// The number by which a tensor is found when the graph runs; positive, since cuDNN takes -1 for none.
pub(super) type Id = i64;

/// The first number of an intermediate result.
const FIRST: Id = 100;

/// The last dimension first varies in memory.
pub(super) fn contiguous([_, b, c, d]: [usize; 4]) -> [usize; 4] {
    [b * c * d, c * d, d, 1]
}

/// Swaps rows and columns.
pub(super) fn swapped([a, b, c, d]: [usize; 4]) -> [usize; 4] {
    [a, b, d, c]
}

/// A tensor of a graph.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    descriptor: Rc<Descriptor>,
    pub(super) sizes: [usize; 4],
    pub(super) strides: [usize; 4],
}

/// The GPU that runs a graph.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), allow(dead_code))]
pub(super) enum Gpu<'a> {
    /// The one of this handle.
    Handle(cudnnHandle_t),
    /// One that is only described, for tests without a GPU.
    Described([&'a Descriptor; 1]),
}

impl Gpu<'_> {
    /// The attribute that names it, if a descriptor has one.
    fn attribute(&self, handle: Option<Name>, described: Option<Name>) -> Option<(Name, Value<'_>)> {
        match self {
            Self::Handle(raw) => handle.map(|name| (name, Value::Handle(*raw))),
            Self::Described(gpu) => described.map(|name| (name, Value::Descriptors(gpu))),
        }
    }
}

/// One of cuDNN's engines by its number, with its settings: numbers of `cudnnBackendKnobType_t`, and their values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Engine {
    pub(super) index: i64,
    pub(super) knobs: &'static [(u32, i64)],
}

/// Where candidates for a plan come from.
#[derive(Clone, Copy)]
enum Source {
    Heuristics(Mode),
    Engine(Engine),
}

/// A graph in the making. cuDNN keeps the addresses of descriptors, so all of them live as long as the graph.
#[derive(Debug, Default)]
pub(super) struct Graph {
    operations: Vec<Descriptor>,
    kinds: Vec<Descriptor>,
    tensors: Vec<Rc<Descriptor>>,
    /// The number of intermediate results.
    results: Id,
}

impl Graph {
    fn add(&mut self, dtype: Type, sizes: [usize; 4], strides: [usize; 4], more: &[(Name, Value)]) -> Outcome<Tensor> {
        let [dims, steps] = [sizes, strides].map(|numbers| numbers.map(|number| number as i64));
        let mut attributes = vec![
            (Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Value::DataType(dtype)),
            (Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Value::Integers(&dims)),
            (Name::CUDNN_ATTR_TENSOR_STRIDES, Value::Integers(&steps)),
        ];
        attributes.extend_from_slice(more);
        let descriptor = Rc::new(Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR, &attributes)?);
        self.tensors.push(Rc::clone(&descriptor));
        Ok(Tensor { descriptor, sizes, strides })
    }

    /// A tensor in memory. cuDNN's kernels load 16 bytes at once.
    pub(super) fn stored(&mut self, id: Id, dtype: Type, sizes: [usize; 4], strides: [usize; 4]) -> Outcome<Tensor> {
        let more = [
            (Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Value::Integers(&[id])),
            (Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Value::Integers(&[16])),
        ];
        self.add(dtype, sizes, strides, &more)
    }

    /// A number in f32, in memory of the host.
    pub(super) fn scalar(&mut self, id: Id) -> Outcome<Tensor> {
        let more = [
            (Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Value::Integers(&[id])),
            (Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Value::Integers(&[4])),
            (Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Value::Flag(true)),
        ];
        self.add(Type::CUDNN_DATA_FLOAT, [1; 4], [1; 4], &more)
    }

    /// An intermediate result, which need not be in memory.
    pub(super) fn between(&mut self, dtype: Type, sizes: [usize; 4], strides: [usize; 4]) -> Outcome<Tensor> {
        let id = [FIRST + self.results];
        self.results += 1;
        let more = [
            (Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Value::Integers(&id)),
            (Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Value::Integers(&[16])),
            (Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Value::Flag(true)),
        ];
        self.add(dtype, sizes, strides, &more)
    }

    /// The same in f32, contiguous.
    pub(super) fn result(&mut self, sizes: [usize; 4]) -> Outcome<Tensor> {
        self.between(Type::CUDNN_DATA_FLOAT, sizes, contiguous(sizes))
    }

    fn operation(&mut self, kind: Kind, tensors: &[(Name, &Tensor)], of: Option<Of>) -> Outcome<()> {
        let of = match of {
            Some((name, kind, attributes)) => Some((name, Descriptor::new(kind, attributes)?)),
            None => None,
        };
        let named: Vec<_> = (tensors.iter().map(|(name, tensor)| (*name, [&*tensor.descriptor])))
            .chain(of.iter().map(|(name, descriptor)| (*name, [descriptor])))
            .collect();
        let attributes: Vec<_> = named.iter().map(|(name, one)| (*name, Value::Descriptors(one))).collect();
        let operation = Descriptor::new(kind, &attributes)?;
        drop(attributes);
        drop(named);
        self.operations.push(operation);
        self.kinds.extend(of.map(|(_, descriptor)| descriptor));
        Ok(())
    }

    /// y = mode(x, b, t), where b and t are broadcast. Indices and comparisons have their own modes.
    fn pointwise(
        &mut self,
        (mode, precision, axis): (Pointwise, Type, Option<i64>),
        [x, y]: [&Tensor; 2],
        [b, t]: [Option<&Tensor>; 2],
    ) -> Outcome<()> {
        let mut tensors =
            vec![(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x), (Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)];
        tensors.extend(b.map(|b| (Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b)));
        tensors.extend(t.map(|t| (Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t)));
        let axis = axis.map(|axis| [axis]);
        let mut attributes = vec![
            (Name::CUDNN_ATTR_POINTWISE_MODE, Value::Pointwise(mode)),
            (Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Value::DataType(precision)),
        ];
        attributes.extend(axis.as_ref().map(|axis| (Name::CUDNN_ATTR_POINTWISE_AXIS, Value::Integers(axis))));
        let of = (
            Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
            Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
            &attributes[..],
        );
        self.operation(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, &tensors, Some(of))
    }

    /// to = mode(x, b) in f32.
    pub(super) fn apply_to(&mut self, mode: Pointwise, x: &Tensor, b: Option<&Tensor>, to: &Tensor) -> Outcome<()> {
        self.pointwise((mode, Type::CUDNN_DATA_FLOAT, None), [x, to], [b, None])
    }

    /// mode(x, b) in f32.
    pub(super) fn apply(&mut self, mode: Pointwise, x: &Tensor, b: Option<&Tensor>) -> Outcome<Tensor> {
        let y = self.result(x.sizes)?;
        self.apply_to(mode, x, b, &y)?;
        Ok(y)
    }

    /// x where the column is at most the row, and `other` elsewhere.
    pub(super) fn lower_triangle(&mut self, x: &Tensor, other: &Tensor) -> Outcome<Tensor> {
        let [row, column] = [2, 3].map(|axis| {
            let index = self.between(Type::CUDNN_DATA_INT32, x.sizes, contiguous(x.sizes))?;
            let mode = (Pointwise::CUDNN_POINTWISE_GEN_INDEX, Type::CUDNN_DATA_FLOAT, Some(axis));
            self.pointwise(mode, [x, &index], [None; 2])?;
            Ok(index)
        });
        let (row, column) = (row?, column?);
        let seen = self.between(Type::CUDNN_DATA_BOOLEAN, x.sizes, contiguous(x.sizes))?;
        let mode = (Pointwise::CUDNN_POINTWISE_CMP_GE, Type::CUDNN_DATA_BOOLEAN, None);
        self.pointwise(mode, [&row, &seen], [Some(&column), None])?;
        let y = self.result(x.sizes)?;
        let mode = (Pointwise::CUDNN_POINTWISE_BINARY_SELECT, Type::CUDNN_DATA_FLOAT, None);
        self.pointwise(mode, [x, &y], [Some(other), Some(&seen)])?;
        Ok(y)
    }

    /// Reduces the dimensions in which `to` is smaller than x.
    pub(super) fn reduce_to(&mut self, by: cudnnReduceTensorOp_t, x: &Tensor, to: &Tensor) -> Outcome<()> {
        let of = [
            (Name::CUDNN_ATTR_REDUCTION_OPERATOR, Value::Reduction(by)),
            (Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Value::DataType(Type::CUDNN_DATA_FLOAT)),
        ];
        let of = (Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR, &of[..]);
        let tensors =
            [(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x), (Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, to)];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, &tensors, Some(of))
    }

    /// Reduces rows to one element.
    pub(super) fn reduce_rows(&mut self, by: cudnnReduceTensorOp_t, x: &Tensor) -> Outcome<Tensor> {
        let [batch, heads, rows, _] = x.sizes;
        let y = self.result([batch, heads, rows, 1])?;
        self.reduce_to(by, x, &y)?;
        Ok(y)
    }

    /// to = a · b, with sums in f32. Neighbouring heads of a may share one of b.
    pub(super) fn product(&mut self, a: &Tensor, b: &Tensor, to: &Tensor) -> Outcome<()> {
        let of = [(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, Value::DataType(Type::CUDNN_DATA_FLOAT))];
        let of = (Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR, &of[..]);
        let tensors = [
            (Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, to),
        ];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, &tensors, Some(of))
    }

    /// The same elements in memory, with rows as columns.
    pub(super) fn transpose(&mut self, dtype: Type, x: &Tensor) -> Outcome<Tensor> {
        let y = self.between(dtype, swapped(x.sizes), swapped(x.strides))?;
        let tensors = [(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x), (Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &y)];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &tensors, None)?;
        Ok(y)
    }

    /// The ways of cuDNN's heuristics or of an engine to compute `graph`, best first.
    fn candidates(&mut self, graph: &Descriptor, gpu: Gpu, source: Source) -> Outcome<Vec<Descriptor>> {
        let graphs = [graph];
        match source {
            Source::Heuristics(mode) => {
                let mut attributes = vec![
                    (Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, Value::Descriptors(&graphs)),
                    (Name::CUDNN_ATTR_ENGINEHEUR_MODE, Value::Heuristics(mode)),
                ];
                attributes.extend(gpu.attribute(None, Some(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP)));
                Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &attributes)?.candidates()
            }
            Source::Engine(Engine { index, knobs }) => {
                let index = [index];
                let mut attributes = vec![
                    (Name::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, Value::Descriptors(&graphs)),
                    (Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Value::Integers(&index)),
                ];
                attributes.extend(gpu.attribute(None, Some(Name::CUDNN_ATTR_ENGINE_DEVICEPROP)));
                let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR, &attributes)?;
                let choice = |(knob, value): &(u32, i64)| {
                    let attributes = [
                        (Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, Value::Knob(*knob)),
                        (Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Value::Integers(&[*value])),
                    ];
                    Descriptor::new(Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, &attributes)
                };
                let choices = knobs.iter().map(choice).collect::<Outcome<Vec<_>>>()?;
                let (engines, chosen) = ([&engine], choices.iter().collect::<Vec<_>>());
                let attributes = [
                    (Name::CUDNN_ATTR_ENGINECFG_ENGINE, Value::Descriptors(&engines)),
                    (Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, Value::Descriptors(&chosen)),
                ];
                let candidate = Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &attributes)?;
                self.kinds.extend(choices.into_iter().chain([engine]));
                Ok(vec![candidate])
            }
        }
    }

    /// Returns the first plan whose workspace has at most `limit` bytes, of an engine if one is named.
    pub(super) fn plan(mut self, gpu: Gpu, limit: usize, engine: Option<Engine>) -> Outcome<Found> {
        let mut least: Option<usize> = None;
        let operations: Vec<_> = self.operations.iter().collect();
        let mut attributes = vec![(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, Value::Descriptors(&operations))];
        attributes.extend(gpu.attribute(Some(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE), None));
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, &attributes)?;
        let heuristics = [Mode::CUDNN_HEUR_MODE_A, Mode::CUDNN_HEUR_MODE_FALLBACK].map(Source::Heuristics);
        for source in engine.map_or(heuristics.to_vec(), |engine| vec![Source::Engine(engine)]) {
            let candidates = Failure::or_nothing(self.candidates(&graph, gpu, source)).map_err(Failure::Other)?;
            for candidate in candidates.unwrap_or_default() {
                let candidates = [&candidate];
                let mut attributes =
                    vec![(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, Value::Descriptors(&candidates))];
                let (handle, described) =
                    (Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
                attributes.extend(gpu.attribute(Some(handle), Some(described)));
                let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &attributes);
                let Some(plan) = Failure::or_nothing(plan).map_err(Failure::Other)? else { continue };
                let workspace = plan.workspace()?;
                if workspace <= limit {
                    return Ok(Ok(Plan { plan, workspace, _uses: (candidate, graph, self) }));
                }
                least = Some(least.map_or(workspace, |least| least.min(workspace)));
                log::debug!("a plan of cuDNN's needs a workspace of {workspace} bytes, and may use {limit}");
            }
        }
        Ok(Err(least))
    }
}

/// A plan, or the smallest workspace that some plan needs.
pub(super) type Found = std::result::Result<Plan, Option<usize>>;

/// A plan, and the size of its workspace in bytes.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) plan: Descriptor,
    pub(super) workspace: usize,
    /// The descriptors that the plan was made of, and may still point to.
    _uses: (Descriptor, Descriptor, Graph),
}
