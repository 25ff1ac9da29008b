//! Attention by cuDNN: softmax(q kᵀ × scale) v as a graph, for which cuDNN has kernels that keep no weights in memory. The gradients
//! of queries are sums over blocks of keys. cuDNN either adds them up with atomic operations, in any order, or keeps their terms:
//! a graph that names memory for the sums gets the former, any other the latter, whose results are the same in every run.
use super::backend::{Descriptor, Failure, Value};
use super::graph::{Engine, Found, Gpu, Graph, Id, Plan, Tensor, contiguous, swapped};
use crate::Result;
use crate::kernels::launches::{Address, AttendShape, AttendTensors};
use candle_core::DType;
use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind, cudnnDataType_t as Type, cudnnHandle_t,
    cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduction,
};
use std::sync::Once;

type Outcome<T> = std::result::Result<T, Failure>;

const Q: Id = 1;
const K: Id = 2;
const V: Id = 3;
const Y: Id = 4;
const NORMALISERS: Id = 5;
const DY: Id = 6;
const DQ: Id = 7;
const DK: Id = 8;
const DV: Id = 9;
const SUMS: Id = 10;
const SCALE: Id = 11;
const UNSEEN: Id = 12;
const ONE: Id = 13;
const DQ_SUMS: Id = 14;

/// The oldest version for which attention is served here: 9.10.2. Before, there were errors in it.
const OLDEST: usize = 91_002;
/// Up to this version, gradients are right only for whole blocks of keys: 9.15.0.
const WHOLE_BLOCKS: usize = 91_500;
const BLOCK: usize = 128;
/// The oldest version with gradients that are the same in every run on GPUs of the major compute capability [`NAMED`]: 9.18.0.
const EXACT: usize = 91_800;
const NAMED: i32 = 10;

/// A pass of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    Backward,
    /// The backward pass, with atomic operations.
    Fast,
}

impl Pass {
    pub(super) fn is_backward(self) -> bool {
        self != Self::Forward
    }

    /// The numbers in f32 that it needs in addition to the workspace: one for each query, and one for each element of the queries' gradients.
    pub(super) fn kept(self, shape: &AttendShape) -> [usize; 2] {
        let queries = shape.batch * shape.heads * shape.queries;
        match self {
            Self::Forward => [0, 0],
            Self::Backward => [queries, 0],
            Self::Fast => [queries, queries * shape.size],
        }
    }
}

/// Warns once if a newer version would serve the backward pass that this version does not.
pub(super) fn warn_of_old(version: usize, capability: i32, pass: Pass, shape: &AttendShape) {
    static SAID: Once = Once::new();
    let is_served = |version| is_served(version, capability, pass, shape);
    if version < OLDEST || is_served(version) || !is_served(EXACT) {
        return;
    }
    let reason = match is_served(WHOLE_BLOCKS + 1) {
        true => format!("is right for multiples of {BLOCK} keys only. Install 9.15.1 or later, or pad the keys"),
        false => {
            "adds this GPU's gradients in any order. Install 9.18 or later, or set CANDLE_DDP_CUDNN_ATTENTION=fast"
                .into()
        }
    };
    SAID.call_once(|| {
        log::warn!(
            "attention's backward pass over {} keys runs without cuDNN, several times as long: cuDNN {}.{}.{} {reason}",
            shape.keys,
            version / 10_000,
            version / 100 % 100,
            version % 100
        );
    });
}

/// The engine that a pass must name. On GPUs of [`NAMED`], only its kernels have the same gradients in every run. Engines and knobs
/// are those of cudnn-frontend (`override_heuristics_query` in scaled_dot_product_flash_attention.h).
fn engine(version: usize, [major, minor]: [i32; 2], pass: Pass) -> Option<Engine> {
    const STAGES: u32 = 14;
    const KERNEL_CFG: u32 = 24;
    const TILE_CGA_M: u32 = 27;
    const STREAM_K: u32 = 38;
    const TILE_M: u32 = 40;
    const TILE_N: u32 = 41;
    let knobs: &[_] = match version {
        92_300.. => &[(TILE_M, 3), (TILE_N, 2), (KERNEL_CFG, 2), (STREAM_K, 0), (TILE_CGA_M, 0), (STAGES, 2)],
        _ => &[(KERNEL_CFG, 31), (STAGES, 2)],
    };
    let index = if minor > 3 { 17 } else { 5 };
    (major == NAMED && pass == Pass::Backward).then_some(Engine { index, knobs })
}

/// Whether this version of cuDNN computes attention on this GPU, of a major compute capability.
pub(super) fn is_served(version: usize, capability: i32, pass: Pass, shape: &AttendShape) -> bool {
    let AttendShape { batch, heads, queries, keys, size, value_size, side_by_side, .. } = *shape;
    // As in convolutions, elements have numbers of 31 bits.
    let elements = [batch, 3 * side_by_side.unwrap_or(heads), queries.max(keys), size.max(value_size)];
    let is_small = i32::try_from(elements.iter().product::<usize>()).is_ok();
    let is_known =
        matches!(capability, 8 | 9 | 12) || (capability == NAMED && (pass == Pass::Fast || version >= EXACT));
    let backward = is_known && (version > WHOLE_BLOCKS || keys.is_multiple_of(BLOCK)) && (queries, keys) != (1, 1);
    version >= OLDEST && is_small && (!pass.is_backward() || backward)
}

/// The tensors that both passes have.
struct Common {
    dtype: Type,
    /// The tensors of queries, keys and values. Keys and values have rows and columns swapped where that is asked for.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    normalisers: Tensor,
    scale: Tensor,
}

/// Sizes and strides, in elements.
struct Layout([usize; 4], [usize; 4]);

impl Layout {
    fn swapped(self) -> Self {
        Self(swapped(self.0), swapped(self.1))
    }

    fn add(self, graph: &mut Graph, id: Id, dtype: Type) -> Outcome<Tensor> {
        graph.stored(id, dtype, self.0, self.1)
    }
}

impl AttendShape {
    /// The layout of a tensor that has only its own heads, or the heads of `parts` tensors side by side.
    fn layout(&self, heads: usize, rows: usize, size: usize, parts: usize) -> Layout {
        let sizes = [self.batch, heads, rows, size];
        let row = |all: usize| parts * all * size;
        Layout(sizes, self.side_by_side.map_or(contiguous(sizes), |all| [rows * row(all), size, row(all), 1]))
    }

    fn queries(&self) -> Layout {
        self.layout(self.heads, self.queries, self.size, 3)
    }

    fn keys(&self) -> Layout {
        self.layout(self.key_heads, self.keys, self.size, 3)
    }

    fn values(&self) -> Layout {
        self.layout(self.key_heads, self.keys, self.value_size, 3)
    }

    fn results(&self) -> Layout {
        self.layout(self.heads, self.queries, self.value_size, 1)
    }

    fn weights(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }

    fn per_query(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, 1]
    }
}

fn data_type(dtype: DType) -> Option<Type> {
    match dtype {
        DType::F16 => Some(Type::CUDNN_DATA_HALF),
        DType::BF16 => Some(Type::CUDNN_DATA_BFLOAT16),
        _ => None,
    }
}

/// The graph of one of the two passes.
fn graph(dtype: Type, pass: Pass, shape: &AttendShape) -> Outcome<Graph> {
    let graph = &mut Graph::default();
    let values = shape.values();
    let common = Common {
        dtype,
        q: shape.queries().add(graph, Q, dtype)?,
        k: shape.keys().swapped().add(graph, K, dtype)?,
        v: if pass.is_backward() { values.swapped() } else { values }.add(graph, V, dtype)?,
        y: shape.results().add(graph, Y, dtype)?,
        normalisers: graph.stored(
            NORMALISERS,
            Type::CUDNN_DATA_FLOAT,
            shape.per_query(),
            contiguous(shape.per_query()),
        )?,
        scale: graph.scalar(SCALE)?,
    };
    match pass {
        Pass::Forward => forward(graph, shape, &common)?,
        Pass::Backward | Pass::Fast => backward(graph, shape, &common, pass)?,
    }
    Ok(std::mem::take(graph))
}

/// q kᵀ × scale.
fn scores(graph: &mut Graph, shape: &AttendShape, Common { q, k, scale, .. }: &Common) -> Outcome<Tensor> {
    let products = graph.result(shape.weights())?;
    graph.product(q, k, &products)?;
    graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &products, Some(scale))
}

fn masked(graph: &mut Graph, shape: &AttendShape, scores: Tensor) -> Outcome<Tensor> {
    if !shape.is_causal {
        return Ok(scores);
    }
    let unseen = graph.scalar(UNSEEN)?;
    graph.lower_triangle(&scores, &unseen)
}

fn forward(graph: &mut Graph, shape: &AttendShape, common: &Common) -> Outcome<()> {
    let scores = scores(graph, shape, common)?;
    let scores = masked(graph, shape, scores)?;
    let largest = graph.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_MAX, &scores)?;
    let shifted = graph.apply(Pointwise::CUDNN_POINTWISE_SUB, &scores, Some(&largest))?;
    let powers = graph.apply(Pointwise::CUDNN_POINTWISE_EXP, &shifted, None)?;
    let sums = graph.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_ADD, &powers)?;
    let logarithms = graph.apply(Pointwise::CUDNN_POINTWISE_LOG, &sums, None)?;
    graph.apply_to(Pointwise::CUDNN_POINTWISE_ADD, &largest, Some(&logarithms), &common.normalisers)?;
    let weights = graph.between(common.dtype, shape.weights(), contiguous(shape.weights()))?;
    graph.apply_to(Pointwise::CUDNN_POINTWISE_DIV, &powers, Some(&sums), &weights)?;
    graph.product(&weights, &common.v, &common.y)
}

fn backward(graph: &mut Graph, shape: &AttendShape, common: &Common, pass: Pass) -> Outcome<()> {
    let Common { dtype, q, k, v, y, normalisers, scale } = common;
    let dy = shape.results().add(graph, DY, *dtype)?;
    let dq = shape.queries().add(graph, DQ, *dtype)?;
    let dk = shape.keys().add(graph, DK, *dtype)?;
    let dv = shape.values().add(graph, DV, *dtype)?;
    let one = graph.scalar(ONE)?;

    // What each query's gradients have in common. The multiplication by one is a part of the graph that cuDNN knows.
    let products = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &dy, Some(y))?;
    let totals = graph.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_ADD, &products)?;
    let sums = graph.stored(SUMS, Type::CUDNN_DATA_FLOAT, shape.per_query(), contiguous(shape.per_query()))?;
    graph.apply_to(Pointwise::CUDNN_POINTWISE_MUL, &totals, Some(&one), &sums)?;

    let scores = scores(graph, shape, common)?;
    let shifted = graph.apply(Pointwise::CUDNN_POINTWISE_SUB, &scores, Some(normalisers))?;
    let shifted = masked(graph, shape, shifted)?;
    let weights = graph.apply(Pointwise::CUDNN_POINTWISE_EXP, &shifted, None)?;
    let by_key = graph.transpose(*dtype, &weights)?;
    of_keys(graph, *dtype, [&by_key, &dy], &dv)?;

    let of_weights = graph.result(shape.weights())?;
    graph.product(&dy, v, &of_weights)?;
    let centred = graph.apply(Pointwise::CUDNN_POINTWISE_SUB, &of_weights, Some(&sums))?;
    let of_scores = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &centred, Some(&weights))?;
    let of_products = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &of_scores, Some(scale))?;
    let by_key = graph.transpose(*dtype, &of_products)?;
    of_keys(graph, *dtype, [&by_key, q], &dk)?;
    let keys = graph.transpose(*dtype, k)?;
    if pass != Pass::Fast {
        return graph.product(&of_products, &keys, &dq);
    }
    let sums = graph.stored(DQ_SUMS, Type::CUDNN_DATA_FLOAT, dq.sizes, contiguous(dq.sizes))?;
    graph.product(&of_products, &keys, &sums)?;
    graph.apply_to(Pointwise::CUDNN_POINTWISE_IDENTITY, &sums, None, &dq)
}

/// A gradient of keys or values, which is the sum of those of the queries' heads that share them.
fn of_keys(graph: &mut Graph, dtype: Type, [a, b]: [&Tensor; 2], to: &Tensor) -> Outcome<()> {
    let [batch, heads, rows, _] = a.sizes;
    if to.sizes[1] == heads {
        return graph.product(a, b, to);
    }
    let sizes = [batch, heads, rows, b.sizes[3]];
    let apart = graph.between(dtype, sizes, contiguous(sizes))?;
    graph.product(a, b, &apart)?;
    graph.reduce_to(Reduction::CUDNN_REDUCE_TENSOR_ADD, &apart, to)
}

/// The plan of a pass, by this version of cuDNN on a GPU of this compute capability.
pub(super) fn plan(
    (gpu, version, capability): (Gpu, usize, [i32; 2]),
    limit: usize,
    (dtype, pass, shape): (DType, Pass, &AttendShape),
) -> Result<Found> {
    let Some(dtype) = data_type(dtype) else { return Ok(Err(None)) };
    let engine = engine(version, capability, pass);
    let found = graph(dtype, pass, shape).and_then(|graph| graph.plan(gpu, limit, engine));
    Ok(Failure::or_nothing(found)?.unwrap_or(Err(None)))
}

/// In what equal parts attention may be computed, one after the other, the largest first: all of it, some of its samples, and of one
/// sample some heads.
pub(super) fn parts(shape: &AttendShape) -> impl Iterator<Item = AttendShape> {
    let whole = *shape;
    let divisors = |count: usize| (2..=count).filter(move |parts| count.is_multiple_of(*parts));
    let samples = divisors(whole.batch).map(move |parts| AttendShape { batch: whole.batch / parts, ..whole });
    let heads = divisors(whole.key_heads).map(move |parts| AttendShape {
        batch: 1,
        heads: whole.heads / parts,
        key_heads: whole.key_heads / parts,
        ..whole
    });
    std::iter::once(whole).chain(samples).chain(heads)
}

impl<'a> AttendTensors<'a> {
    /// The tensors of the part of `whole` that begins at this sample and this head of keys.
    pub(super) fn part(&self, (whole, dtype): (&AttendShape, DType), sample: usize, key_head: usize) -> Self {
        let head = key_head * (whole.heads / whole.key_heads);
        let from = |address: Address<'a>, Layout(_, strides): Layout, head: usize, dtype: DType| {
            address.skip(sample * strides[0] + head * strides[1], dtype)
        };
        let of_qkv = |[q, k, v]: [Address<'a>; 3]| {
            let (k, v) = (from(k, whole.keys(), key_head, dtype), from(v, whole.values(), key_head, dtype));
            [from(q, whole.queries(), head, dtype), k, v]
        };
        let of_results = |address| from(address, whole.results(), head, dtype);
        let per_query = Layout(whole.per_query(), contiguous(whole.per_query()));
        Self {
            qkv: of_qkv(self.qkv),
            y: of_results(self.y),
            normalisers: from(self.normalisers, per_query, head, DType::F32),
            backward: self.backward.map(|(dy, gradients)| (of_results(dy), of_qkv(gradients))),
        }
    }
}

/// Enqueues a pass on the handle's stream. Does not wait. `kept` is memory for what `Pass::kept` counts.
pub(super) fn run(
    handle: cudnnHandle_t,
    (plan, pass): (&Plan, Pass),
    (shape, scale): (&AttendShape, f64),
    tensors: &AttendTensors,
    [kept @ .., workspace]: [Address; 3],
) -> Result<()> {
    let pointer = |address: Address| address.0 as *mut std::ffi::c_void;
    let (scale, unseen, one) = (scale as f32, f32::NEG_INFINITY, 1f32);
    let scalar = |number: &f32| std::ptr::from_ref(number).cast_mut().cast();
    let AttendTensors { qkv: [q, k, v], y, normalisers, backward } = *tensors;
    let mut given = vec![(Q, pointer(q)), (K, pointer(k)), (V, pointer(v)), (Y, pointer(y))];
    given.extend([(NORMALISERS, pointer(normalisers)), (SCALE, scalar(&scale))]);
    if shape.is_causal {
        given.push((UNSEEN, scalar(&unseen)));
    }
    if let Some((dy, [dq, dk, dv])) = backward {
        given.extend([(DY, pointer(dy)), (DQ, pointer(dq)), (DK, pointer(dk)), (DV, pointer(dv))]);
        given.extend([(SUMS, pointer(kept[0])), (ONE, scalar(&one))]);
    }
    if pass == Pass::Fast {
        given.push((DQ_SUMS, pointer(kept[1])));
    }
    let (ids, pointers): (Vec<_>, Vec<_>) = given.into_iter().unzip();
    let workspace = [pointer(workspace)];
    let mut attributes = vec![
        (Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Value::Integers(&ids)),
        (Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Value::Pointers(&pointers)),
    ];
    if plan.workspace > 0 {
        attributes.push((Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Value::Pointers(&workspace)));
    }
    let done = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &attributes).and_then(|pack| {
        // SAFETY: the handle exists, and the tensors are as the graph describes them; they live until the call returns, and
        // memory that is freed later is freed after the kernels, on the same stream. The scalars are read before the call
        // returns. The workspace is as large as the plan asked for.
        unsafe { plan.plan.execute(handle, &pack) }
    });
    done.map_err(|failure| match failure {
        Failure::NotSupported(status) => super::descriptor::failure("executing a graph", status),
        Failure::Other(error) => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttendShape = AttendShape {
        batch: 4,
        heads: 12,
        key_heads: 12,
        queries: 1024,
        keys: 1024,
        size: 64,
        value_size: 64,
        is_causal: true,
        side_by_side: Some(12),
    };

    #[test]
    fn versions_and_gpus_with_errors_are_not_served() {
        let served = |version, capability, shape: AttendShape| {
            [Pass::Forward, Pass::Backward, Pass::Fast].map(|pass| is_served(version, capability, pass, &shape))
        };
        assert_eq!(served(92_800, 8, SHAPE), [true; 3]);
        assert_eq!(served(91_001, 8, SHAPE), [false; 3]);
        assert_eq!([11, 7].map(|capability| served(92_800, capability, SHAPE)), [[true, false, false]; 2]);
        assert_eq!([91_700, 91_800].map(|version| served(version, 10, SHAPE)), [[true, false, true], [true; 3]]);
        assert_eq!(served(91_700, 12, SHAPE), [true; 3]);
        let odd = AttendShape { keys: 1000, ..SHAPE };
        assert_eq!([91_500, 91_501].map(|version| served(version, 9, odd)), [[true, false, false], [true; 3]]);
        assert_eq!(served(92_800, 9, AttendShape { queries: 1, keys: 1, ..SHAPE }), [true, false, false]);
        assert_eq!(served(92_800, 9, AttendShape { batch: 1000, ..SHAPE }), [false; 3]);
    }

    #[test]
    fn parts_are_equal_and_become_smaller() {
        let sizes = |shape: AttendShape| {
            let parts = parts(&shape).map(|part| (part.batch, part.heads, part.key_heads));
            parts.collect::<Vec<_>>()
        };
        let shape = AttendShape { batch: 6, heads: 8, key_heads: 4, ..SHAPE };
        let samples = [6, 3, 2, 1].map(|batch| (batch, 8, 4));
        assert_eq!(sizes(shape), [&samples[..], &[(1, 4, 2), (1, 2, 1)]].concat());
        assert_eq!(sizes(AttendShape { batch: 1, heads: 3, key_heads: 1, ..SHAPE }), [(1, 3, 1)]);
    }

    /// A GPU of NVIDIA's, as cuDNN would describe it.
    fn described(name: &str, version: usize, processors: usize, shared: usize) -> Descriptor {
        let text = format!(
            r#"{{"deviceVer":{version},"driverVer":13000,"deviceName":"{name}","cudaDeviceId":0,"maxGridSize":[2147483647,65535,65535],"#
        ) + &format!(
            r#""maxBlockSize":[1024,1024,64],"regsPerBlock":65536,"multiProcessorCount":{processors},"smCountOrigin":0,"warpSize":32,"#
        ) + &format!(
            r#""maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":{shared},"reservedSharedMemoryPerBlock":1024,"#
        ) + r#""oversizedSharedMemoryPerBlock":0,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"#
            + r#""maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":85899345920,"#
            + r#""smClockRateKHz":1410000,"memClockRateKHz":1593000,"memoryBusWidth":5120,"l2CacheSize":41943040}"#;
        let attributes = [(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, Value::Text(text.as_bytes()))];
        Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &attributes).unwrap()
    }

    /// cuDNN itself accepts the graphs, and makes plans of them, for GPUs that are only described.
    #[test]
    #[ignore = "needs the library of cuDNN: scripts/cudnn_plans.sh runs it"]
    fn cudnn_has_plans_for_the_graphs() {
        let version = cudarc::cudnn::result::get_version();
        println!("cuDNN {version}");
        let gpus = [
            (described("A100", 800, 108, 166_912), [8, 0]),
            (described("H100", 900, 132, 232_448), [9, 0]),
            (described("B200", 1000, 148, 232_448), [10, 0]),
            (described("B300", 1030, 148, 232_448), [10, 3]),
            (described("RTX 5090", 1200, 170, 101_376), [12, 0]),
        ];
        let apart = AttendShape { side_by_side: None, ..SHAPE };
        let cases = [
            ("packed", SHAPE, [true; 3]),
            ("apart", apart, [true; 3]),
            ("all keys", AttendShape { is_causal: false, ..SHAPE }, [true; 3]),
            ("shared keys", AttendShape { key_heads: 4, ..apart }, [true; 3]),
            ("one head of keys", AttendShape { key_heads: 1, ..apart }, [true; 3]),
            ("rows of 128", AttendShape { size: 128, value_size: 128, ..SHAPE }, [true; 3]),
            ("rows of 72", AttendShape { size: 72, value_size: 72, ..SHAPE }, [true; 3]),
            ("rows of 8", AttendShape { size: 8, value_size: 8, ..SHAPE }, [true; 3]),
            ("other values", AttendShape { value_size: 32, ..apart }, [true; 3]),
            ("two heads of twelve", AttendShape { batch: 1, heads: 2, key_heads: 2, ..SHAPE }, [true; 3]),
            ("odd lengths", AttendShape { queries: 77, keys: 130, ..apart }, [true; 3]),
            ("more queries", AttendShape { queries: 130, keys: 77, ..apart }, [true; 3]),
            ("one query", AttendShape { queries: 1, is_causal: false, ..apart }, [true; 3]),
            ("rows of 5", AttendShape { size: 5, value_size: 5, ..apart }, [false; 3]),
        ];
        for ((gpu, capability), dtype) in gpus.iter().flat_map(|gpu| [(gpu, DType::F16), (gpu, DType::BF16)]) {
            for (name, shape, expected) in cases {
                let plans = [Pass::Forward, Pass::Backward, Pass::Fast]
                    .map(|pass| plan((Gpu::Described([gpu]), version, *capability), usize::MAX, (dtype, pass, &shape)))
                    .map(Result::unwrap);
                let workspaces = plans.each_ref().map(|plan| plan.as_ref().ok().map(|plan| plan.workspace));
                println!("{capability:?}, {dtype:?}, {name}: workspaces {workspaces:?}");
                assert_eq!(
                    workspaces.map(|workspace| workspace.is_some()),
                    expected,
                    "{capability:?}, {dtype:?}, {name}"
                );
                // Only the deterministic pass keeps a term for each query and key, and none does with a named engine.
                if let (false, [_, Some(exact), Some(fast)]) = (capability[0] == NAMED, workspaces) {
                    assert!(fast <= exact, "{capability:?}, {dtype:?}, {name}");
                }
            }
        }
    }
}
