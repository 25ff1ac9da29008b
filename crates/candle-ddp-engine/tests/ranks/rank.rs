//! One rank under test, and calls with their memory.
use candle_ddp_engine::flight_recorder::Recording;
use candle_ddp_engine::{
    Call, CallSite, Channel, Construction, CpuOptions, Element, Engine, Label, Memory, Operands, Operation, ReduceOp,
    Result, ShapeCode, Slice, Tensors, Work,
};
use candle_ddp_rendezvous::Store;
use parking_lot::{RwLock, RwLockReadGuard};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// Numbers behind a lock, which all clones share.
#[derive(Clone)]
pub(crate) struct Tensor {
    memory: Arc<Bytes>,
    element: Element,
    dims: Vec<usize>,
}

/// Bytes, which are aligned for every element type.
struct Bytes {
    words: RwLock<Vec<u64>>,
    length: usize,
}

impl Memory for Bytes {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn read(&self, patience: Option<Duration>, work: &mut dyn FnMut(&[u8])) -> bool {
        let guard = self.words.try_read_recursive_for(patience.unwrap_or_default());
        guard.map(|words| work(&bytemuck::cast_slice(&words)[..self.length])).is_some()
    }

    fn write(&self, patience: Option<Duration>, work: &mut dyn FnMut(&mut [u8])) -> bool {
        let guard = self.words.try_write_for(patience.unwrap_or_default());
        guard.map(|mut words| work(&mut bytemuck::cast_slice_mut(&mut words)[..self.length])).is_some()
    }
}

impl Tensor {
    fn new(element: Element, dims: &[usize]) -> Self {
        let length = dims.iter().product::<usize>() * element.size();
        let words = RwLock::new(vec![0; length.div_ceil(8)]);
        Self { memory: Arc::new(Bytes { words, length }), element, dims: dims.to_vec() }
    }

    pub(crate) fn zeros(count: usize) -> Self {
        Self::new(Element::F32, &[count])
    }

    pub(crate) fn zeros_f64(count: usize) -> Self {
        Self::new(Element::F64, &[count])
    }

    /// Zeros of this shape.
    pub(crate) fn shaped(dims: &[usize]) -> Self {
        Self::new(Element::F32, dims)
    }

    pub(crate) fn full(value: f32, count: usize) -> Self {
        let tensor = Self::zeros(count);
        tensor.memory.write(None, &mut |bytes| bytemuck::cast_slice_mut(bytes).fill(value));
        tensor
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        bytemuck::cast_slice(&self.lock())[..self.count()].to_vec()
    }

    /// Holds the lock, as a program does that reads the memory meanwhile.
    pub(crate) fn lock(&self) -> RwLockReadGuard<'_, Vec<u64>> {
        self.memory.words.read()
    }

    fn count(&self) -> usize {
        self.dims.iter().product()
    }

    fn slice(&self) -> Slice<'_> {
        Slice::new(&*self.memory, 0..self.memory.length)
    }
}

/// A call with its memory.
#[derive(Clone)]
pub(crate) enum Collective {
    AllReduce { tensor: Tensor, op: ReduceOp },
    Broadcast { tensor: Tensor, root: usize },
    Reduce { tensor: Tensor, root: usize, op: ReduceOp },
    AllGather { output: Tensor, input: Tensor },
    ReduceScatter { output: Tensor, input: Tensor, op: ReduceOp },
    Gather { output: Option<Tensor>, input: Tensor, root: usize },
    Scatter { output: Tensor, input: Option<Tensor>, root: usize },
    Send { tensor: Tensor, peer: usize },
    Recv { tensor: Tensor, peer: usize },
    Barrier,
}

/// A call as the engine takes it.
struct Job {
    call: Call,
    channel: Channel,
    output: Option<Tensor>,
    input: Option<Tensor>,
}

impl From<Collective> for Job {
    fn from(collective: Collective) -> Self {
        let of = |operation, output: Option<Tensor>, input: Option<Tensor>, counted: &Tensor| Self {
            call: Call {
                element: Some(counted.element),
                count: counted.count() as u64,
                shape: ShapeCode::of(&counted.dims),
                label: Label::current(),
                place: CallSite::current(),
                ..Call::bare(operation)
            },
            channel: Channel::Collectives,
            output,
            input,
        };
        let reduced = |op, job: Self| Self { call: Call { reduction: Some(op), ..job.call }, ..job };
        let rooted = |root, job: Self| Self { call: Call { root: Some(root), ..job.call }, ..job };
        let on_one = |operation, tensor: Tensor| of(operation, Some(tensor.clone()), None, &tensor);
        match collective {
            Collective::AllReduce { tensor, op } => reduced(op, on_one(Operation::AllReduce, tensor)),
            Collective::Broadcast { tensor, root } => rooted(root, on_one(Operation::Broadcast, tensor)),
            Collective::Reduce { tensor, root, op } => reduced(op, rooted(root, on_one(Operation::Reduce, tensor))),
            Collective::AllGather { output, input } => {
                of(Operation::AllGather, Some(output), Some(input.clone()), &input)
            }
            Collective::ReduceScatter { output, input, op } => {
                reduced(op, of(Operation::ReduceScatter, Some(output.clone()), Some(input), &output))
            }
            Collective::Gather { output, input, root } => {
                rooted(root, of(Operation::Gather, output, Some(input.clone()), &input))
            }
            Collective::Scatter { output, input, root } => {
                rooted(root, of(Operation::Scatter, Some(output.clone()), input, &output))
            }
            Collective::Send { tensor, peer } => {
                let job = of(Operation::Send, None, Some(tensor.clone()), &tensor);
                Self { channel: Channel::SendTo(peer), ..job }
            }
            Collective::Recv { tensor, peer } => {
                Self { channel: Channel::RecvFrom(peer), ..on_one(Operation::Recv, tensor) }
            }
            Collective::Barrier => {
                let (call, channel) = (Call::bare(Operation::Barrier), Channel::Collectives);
                Self { call, channel, output: None, input: None }
            }
        }
    }
}

impl Tensors for Job {
    fn with(&self, work: &mut dyn FnMut(Operands)) {
        work(self.operands());
    }
}

impl Job {
    fn operands(&self) -> Operands<'_> {
        let [output, input] = [&self.output, &self.input].map(|tensor| tensor.as_ref().map(Tensor::slice));
        Operands { output, input }
    }
}

/// One rank.
pub(crate) struct Rank(Engine);

impl Deref for Rank {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.0
    }
}

impl Rank {
    pub(crate) fn new(store: Arc<dyn Store>, rank: usize, world_size: usize, options: CpuOptions) -> Result<Self> {
        Ok(Self(Engine::new(Construction::default(), store, rank, world_size, options)?))
    }

    /// A rank whose calls `recording` remembers.
    pub(crate) fn recorded(
        recording: &Recording,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        options: CpuOptions,
    ) -> Result<Self> {
        let construction = Construction { recording: Some(recording), ..Construction::default() };
        Ok(Self(Engine::new(construction, store, rank, world_size, options)?))
    }

    /// Makes a call, and waits for it.
    pub(crate) fn run(&self, collective: Collective) -> Result<()> {
        let job = Job::from(collective);
        match self.queue(job.channel)?.run(job.call, job.operands()) {
            Some(result) => Ok(result?),
            None => Ok(self.put(job)?.wait()?),
        }
    }

    pub(crate) fn start(&self, collective: Collective) -> Result<Work> {
        self.put(collective.into())
    }

    /// Starts messages as a batch, and waits for them.
    pub(crate) fn run_batch(&self, messages: Vec<Collective>) -> Result<()> {
        let start = || messages.into_iter().map(|message| self.start(message)).collect::<Result<Vec<_>>>();
        let works = Label::BATCH.during(start)?;
        Ok(works.iter().try_for_each(Work::wait)?)
    }

    fn put(&self, job: Job) -> Result<Work> {
        self.queue(job.channel)?.start(job.call, Box::new(job))
    }
}
