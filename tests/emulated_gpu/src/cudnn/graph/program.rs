//! What finalized descriptors mean: operations on tensors, which are checked here, and in which order a plan executes them.
use super::attributes::*;
use super::evaluate::{Operation, Tensor, Type};
use super::{
    BAD_PARAM, BAD_PARAM_MISALIGNED_POINTER, BAD_PARAM_NULL_POINTER, NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT,
};
use super::{SUCCESS, Status};
use crate::memory;
use std::collections::{BTreeMap, BTreeSet};

/// Candidates, in the order in which they are returned: one whose plan cannot be made, one with a workspace that is too large,
/// and a good one.
const BAD: i64 = 0;
const LARGE: i64 = 1;
const GOOD: i64 = 2;

/// Checks a descriptor whose required attributes are set.
///
/// # Safety
/// The descriptors that it names must exist.
pub(super) unsafe fn verify(descriptor: &Descriptor) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match descriptor.kind {
            Kind::Tensor => match Tensor::new(descriptor) {
                Some(_) => SUCCESS,
                None => BAD_PARAM,
            },
            Kind::PointwiseOperation | Kind::MatmulOperation | Kind::ReductionOperation | Kind::ReshapeOperation => {
                match Operation::new(descriptor) {
                    Some(operation) if operation.fits() => SUCCESS,
                    Some(operation) => {
                        eprintln!("emulated cuDNN: these tensors do not fit each other: {operation:?}");
                        BAD_PARAM
                    }
                    None => BAD_PARAM,
                }
            }
            Kind::Graph => match is_ordered(&operations(descriptor)) {
                true => SUCCESS,
                false => BAD_PARAM,
            },
            Kind::Plan => match plan_of(descriptor).candidate {
                BAD => NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT,
                _ => SUCCESS,
            },
            Kind::VariantPack if descriptor.values[&PACK_IDS].len() != descriptor.values[&PACK_POINTERS].len() => {
                BAD_PARAM
            }
            _ => SUCCESS,
        }
    }
}

/// # Safety
/// The operations of the graph must exist.
unsafe fn operations(graph: &Descriptor) -> Vec<Operation> {
    let operations = graph.values[&GRAPH_OPERATIONS].iter();
    // SAFETY: guaranteed by the caller; they were checked when they were finalized.
    operations.filter_map(|address| unsafe { Operation::new(&*(*address as *const Descriptor)) }).collect()
}

/// Whether every tensor is written once, and every virtual one before it is read, and whether numbers stand for one tensor each.
/// `reshape` may give a tensor another shape, under another number.
fn is_ordered(operations: &[Operation]) -> bool {
    let (mut written, mut known) = (BTreeSet::new(), BTreeMap::new());
    operations.iter().all(|operation| {
        let mut all = operation.inputs().chain([operation.output()]);
        let is_one = all.all(|tensor| *known.entry(tensor.id).or_insert(tensor) == tensor);
        let is_there = operation.inputs().all(|tensor| !tensor.is_virtual || written.contains(&tensor.id));
        is_one && is_there && written.insert(operation.output().id)
    })
}

/// # Safety
/// The graph must exist.
pub(super) unsafe fn candidates(heuristics: &Descriptor) -> Vec<Descriptor> {
    let graph = heuristics.one(HEURISTICS_GRAPH);
    // SAFETY: guaranteed by the caller.
    let operations = unsafe { operations(&*(graph as *const Descriptor)) };
    // Rows of queries, keys and values that cuDNN's kernels take on an A100; those of the backward pass, which has more products,
    // take shorter ones.
    let products: Vec<_> = operations.iter().filter(|operation| operation.is_product()).collect();
    let most = if products.len() == 2 { 256 } else { 128 };
    let is_served =
        products.iter().flat_map(|product| product.inputs()).filter(|tensor| !tensor.is_virtual).all(|tensor| {
            let row = tensor.row().unwrap_or_default();
            matches!(tensor.kind, Type::F16 | Type::BF16) && row.is_multiple_of(8) && row <= most
        });
    let candidate = |number| {
        let mut candidate = Descriptor::new(Kind::Configuration);
        candidate.values.insert(CONFIGURATION_NUMBER, vec![number]);
        candidate.values.insert(CONFIGURATION_GRAPH, vec![graph]);
        candidate.is_finalized = true;
        candidate
    };
    if is_served { [BAD, LARGE, GOOD].map(candidate).into() } else { Vec::new() }
}

/// A plan.
pub(super) struct Plan<'a> {
    pub(super) graph: &'a Descriptor,
    candidate: i64,
    /// In bytes. It is overwritten, to see that it exists.
    pub(super) workspace: usize,
}

/// # Safety
/// The descriptors of the plan must exist.
pub(super) unsafe fn plan_of(plan: &Descriptor) -> Plan<'_> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let configuration = &*(plan.one(PLAN_CONFIGURATION) as *const Descriptor);
        let graph = &*(configuration.one(CONFIGURATION_GRAPH) as *const Descriptor);
        let candidate = configuration.one(CONFIGURATION_NUMBER);
        let operations = operations(graph);
        // As cuDNN's: the backward pass keeps two bytes for each pair of a query and a key, unless it has memory for sums.
        let weights = operations.iter().map(|operation| operation.output().count()).max().unwrap_or_default();
        let kept = if is_forward(&operations) || adds_in_any_order(&operations) { 0 } else { weights };
        let workspace = if candidate == LARGE { 8 << 30 } else { 2 * kept + 12 };
        Plan { graph, candidate, workspace }
    }
}

/// Whether these are the operations of attention's forward pass: there are more products in its backward pass.
fn is_forward(operations: &[Operation]) -> bool {
    operations.iter().filter(|operation| operation.is_product()).count() == 2
}

/// Whether the gradients of queries are sums in memory, to which cuDNN adds by atomic operations.
fn adds_in_any_order(operations: &[Operation]) -> bool {
    operations.iter().any(Operation::is_conversion)
}

/// The operations of a plan, with the addresses of tensors, and the values of scalars.
pub(super) struct Program {
    operations: Vec<Operation>,
    addresses: BTreeMap<i64, u64>,
    scalars: BTreeMap<i64, f64>,
}

impl Program {
    /// # Safety
    /// The descriptors of the graph must exist, and scalars must be on the host.
    pub(super) unsafe fn new(graph: &Descriptor, given: BTreeMap<i64, i64>) -> Result<Self, Status> {
        // SAFETY: guaranteed by the caller.
        let operations = unsafe { operations(graph) };
        let tensors = operations.iter().flat_map(|operation| operation.inputs().chain([operation.output()]));
        let needed: BTreeMap<i64, &Tensor> =
            tensors.filter(|tensor| !tensor.is_virtual).map(|tensor| (tensor.id, tensor)).collect();
        if !needed.keys().eq(given.keys()) {
            eprintln!("emulated cuDNN: the tensors must be {:?}, not {:?}", needed.keys(), given.keys());
            return Err(BAD_PARAM);
        }
        let (mut addresses, mut scalars) = (BTreeMap::new(), BTreeMap::new());
        for (id, tensor) in needed {
            let address = given[&id] as u64;
            if address == 0 {
                return Err(BAD_PARAM_NULL_POINTER);
            }
            if !address.is_multiple_of(tensor.alignment) {
                return Err(BAD_PARAM_MISALIGNED_POINTER);
            }
            match tensor.is_by_value {
                // SAFETY: guaranteed by the caller.
                true => drop(scalars.insert(id, unsafe { tensor.kind.read(address, 0) })),
                false => drop(addresses.insert(id, address)),
            }
        }
        Ok(Self { operations, addresses, scalars })
    }

    /// For counts. The backward pass has five products.
    pub(super) fn name(&self) -> &'static str {
        match () {
            () if is_forward(&self.operations) => "attention forward",
            () if adds_in_any_order(&self.operations) => "attention backward in any order",
            () => "attention backward",
        }
    }

    /// Ends the process if a tensor is not allocated.
    pub(super) fn check(&self) {
        for tensor in self.operations.iter().flat_map(|operation| operation.inputs().chain([operation.output()])) {
            if let Some(address) = self.addresses.get(&tensor.id) {
                memory::check(*address, tensor.bytes(), "a tensor of a graph");
            }
        }
    }

    /// # Safety
    /// The tensors must be allocated, and nothing else may use them.
    pub(super) unsafe fn run(&self) {
        let mut values: BTreeMap<i64, Vec<f64>> = self.scalars.iter().map(|(id, value)| (*id, vec![*value])).collect();
        for operation in &self.operations {
            for tensor in operation.inputs() {
                if let Some(address) = self.addresses.get(&tensor.id) {
                    // SAFETY: guaranteed by the caller.
                    values.entry(tensor.id).or_insert_with(|| unsafe { tensor.load(*address) });
                }
            }
            let output = operation.output();
            let found = operation.evaluate(&values).into_iter().map(|value| output.kind.round(value)).collect();
            if let Some(address) = self.addresses.get(&output.id) {
                // SAFETY: guaranteed by the caller.
                unsafe { output.store(*address, &found) };
            }
            values.insert(output.id, found);
        }
    }
}
