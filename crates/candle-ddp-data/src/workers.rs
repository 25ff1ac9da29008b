//! Threads that read samples and make batches of them ahead of the thread that asks, and in order.
//!
//! Workers take samples, one at a time, in the order in which they are needed; whoever reads the last sample of a batch
//! makes the batch. So all workers share the work on the next batch, and a slow sample holds up nothing but its own batch
//! and the delivery of those after it. The window bounds how many batches are begun and not yet delivered.
use super::late::Patience;
use super::order::Batches;
use super::recipe::Recipe;
use super::{Dataset, LoaderOptions};
use candle_ddp_base::activity::during;
use candle_ddp_base::panic::{lock, wait, wait_timeout};
use candle_ddp_base::text::some;
use candle_ddp_state::{Error, Result};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is a worker of a loader.
pub(super) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// The batches of one epoch. Dropping it ends the workers: each after the sample or
/// the batch that it is working on, which nobody waits for.
pub(super) struct Workers<S, T>(Arc<Shared<S, T>>);

struct Shared<S, T> {
    window: Mutex<Window<S, T>>,
    /// Tells workers that the window has moved or was closed.
    moved: Condvar,
    /// Tells whoever waits for it that the first batch is made, or that there is none.
    made: Condvar,
}

/// The batches that were begun and not delivered.
struct Window<S, T> {
    rank: usize,
    options: LoaderOptions,
    /// The batches that are not begun.
    order: Batches,
    batches: VecDeque<Batch<S, T>>,
    /// The number of the first one of them in the epoch.
    first: usize,
    /// The next sample to read: the number of its batch, and its place in it.
    next: (usize, usize),
    /// The present work of each worker.
    work: Vec<Option<Work>>,
    /// Nothing is left to be begun.
    exhausted: bool,
    /// Nobody wants batches any more.
    closed: bool,
}

struct Batch<S, T> {
    indices: Arc<[usize]>,
    samples: Vec<Option<Result<S>>>,
    /// The number of samples that are not read yet.
    missing: usize,
    batch: Option<Result<T>>,
}

/// A sample to read.
#[derive(Clone, Copy)]
struct Job {
    batch: usize,
    place: usize,
    index: usize,
}

/// A worker's sample and, when it was the last of its batch, that batch.
#[derive(Clone, Copy)]
struct Work {
    job: Job,
    collates: bool,
    since: Instant,
}

/// All samples of a batch.
struct Complete<S> {
    indices: Arc<[usize]>,
    samples: Vec<Result<S>>,
}

impl<S: Send + 'static, T: Send + 'static> Workers<S, T> {
    /// Starts `options.num_workers` threads.
    pub(super) fn start<D, F>(recipe: Recipe<D, F>, order: Batches, options: LoaderOptions) -> Result<Self>
    where
        D: Dataset<Sample = S> + 'static,
        F: Fn(Vec<S>) -> Result<T> + Send + Sync + 'static,
    {
        // An order's own batches have many samples.
        let count = if order.len() == 0 { 0 } else { options.num_workers.min(order.samples_left()) };
        let window = Window {
            rank: recipe.rank,
            options,
            exhausted: order.len() == 0,
            order,
            batches: VecDeque::new(),
            first: 0,
            next: (0, 0),
            work: vec![None; count],
            closed: false,
        };
        let shared = Shared { window: Mutex::new(window), moved: Condvar::new(), made: Condvar::new() };
        // Dropped when a thread cannot be started, which ends the others.
        let workers = Self(Arc::new(shared));
        let recipe = Arc::new(recipe);
        for number in 0..count {
            let (shared, recipe) = (workers.0.clone(), recipe.clone());
            // A separate pool for each worker: candle's and our operations compute on rayon's current pool, which is
            // then this one thread, instead of competing with training for the threads of the global pool.
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(1)
                .thread_name(move |_| format!("data-worker-{number}"))
                // What is read and collated cannot panic here. What is left over may, when it is dropped, and without
                // this it would end the process.
                .panic_handler(|_| ())
                .build()
                .map_err(|error| {
                    let context = format!("starting worker {number} of {count} of a data loader");
                    Error::io(context, std::io::Error::other(error))
                })?;
            // The pool's thread ends after this.
            pool.spawn(move || work(number, &shared, &recipe));
        }
        Ok(workers)
    }
}

/// The work of a worker thread.
fn work<D: Dataset, T, F>(worker: usize, shared: &Shared<D::Sample, T>, recipe: &Recipe<D, F>)
where
    F: Fn(Vec<D::Sample>) -> Result<T>,
{
    IS_WORKER.set(true);
    while let Some(job) = shared.take(worker) {
        let sample = recipe.read(job.index);
        if let Some(Complete { indices, samples }) = shared.put(worker, &job, sample) {
            let batch = recipe.collate(&indices, samples);
            shared.deliver(job.batch, batch);
        }
    }
}

impl<S, T> Shared<S, T> {
    /// The next sample to read, when there is room for it. None when there is nothing left to do.
    fn take(&self, worker: usize) -> Option<Job> {
        let mut window = lock(&self.window);
        window.work[worker] = None;
        loop {
            if window.closed || window.exhausted {
                return None;
            }
            let (batch, _) = window.next;
            let begun = batch < window.first + window.batches.len();
            if begun || window.has_room() {
                if !begun && !window.begin() {
                    // The others as well have nothing left to do.
                    self.moved.notify_all();
                    self.made.notify_all();
                    return None;
                }
                let job = window.job();
                window.work[worker] = Some(Work { job, collates: false, since: Instant::now() });
                return Some(job);
            }
            window = wait(&self.moved, window);
        }
    }

    /// Hands a sample in. Returns the samples of its batch if it was the last one.
    fn put(&self, worker: usize, job: &Job, sample: Result<S>) -> Option<Complete<S>> {
        let mut window = lock(&self.window);
        // Unless the window was closed or the batch given up, it is still there: it is not made without this sample.
        let batch = window.batch(job.batch)?;
        batch.samples[job.place] = Some(sample);
        batch.missing -= 1;
        if batch.missing > 0 {
            return None;
        }
        let samples = std::mem::take(&mut batch.samples).into_iter().flatten().collect();
        let complete = Complete { indices: batch.indices.clone(), samples };
        window.work[worker] = Some(Work { job: *job, collates: true, since: Instant::now() });
        Some(complete)
    }

    /// Hands a batch in.
    fn deliver(&self, number: usize, made: Result<T>) {
        let mut window = lock(&self.window);
        if let Some(batch) = window.batch(number) {
            batch.batch = Some(made);
            if number == window.first {
                self.made.notify_all();
            }
        }
    }
}

impl<S, T> Window<S, T> {
    fn has_room(&self) -> bool {
        self.batches.len() < self.options.num_workers * self.options.prefetch_factor
    }

    /// Begins another batch, if there is one.
    fn begin(&mut self) -> bool {
        let mut indices = Vec::new();
        self.exhausted = !self.order.next_into(&mut indices);
        if !self.exhausted {
            let (samples, missing) = (indices.iter().map(|_| None).collect(), indices.len());
            self.batches.push_back(Batch { indices: indices.into(), samples, missing, batch: None });
        }
        !self.exhausted
    }

    /// A batch by its number in the epoch, if it was begun and is still wanted.
    fn batch(&mut self, number: usize) -> Option<&mut Batch<S, T>> {
        self.batches.get_mut(number.checked_sub(self.first)?)
    }

    /// The next sample, of a batch that was begun.
    fn job(&mut self) -> Job {
        let (batch, place) = self.next;
        let indices = &self.batches[batch - self.first].indices;
        self.next = if place + 1 == indices.len() { (batch + 1, 0) } else { (batch, place + 1) };
        Job { batch, place, index: indices[place] }
    }

    /// Whether all batches were delivered.
    fn is_over(&self) -> bool {
        self.exhausted && self.batches.is_empty()
    }

    fn is_ready(&self) -> bool {
        self.batches.front().is_some_and(|batch| batch.batch.is_some())
    }

    /// The workers that the first batch waits for, the one that has worked the longest first: those that read its samples or
    /// collate it or, if there are none, those that still work on batches that were given up.
    fn awaited(&self) -> Vec<(usize, Work)> {
        let mut busy: Vec<_> =
            self.work.iter().enumerate().filter_map(|(worker, work)| Some((worker, (*work)?))).collect();
        if busy.iter().any(|(_, work)| work.job.batch == self.first) {
            busy.retain(|(_, work)| work.job.batch == self.first);
        }
        busy.sort_by_key(|(_, work)| work.since);
        busy
    }

    /// The workers' part in the first batch.
    fn activity(&self) -> String {
        let describe = |(worker, work): (usize, Work)| {
            let (index, seconds) = (work.job.index, work.since.elapsed().as_secs());
            match work.collates {
                false => format!("worker {worker} has been in Dataset::get of sample {index} for {seconds} s"),
                true => format!("worker {worker} has been making the batch of sample {index} for {seconds} s"),
            }
        };
        let workers: Vec<String> = self.awaited().into_iter().map(describe).collect();
        if workers.is_empty() { "no worker has begun it".to_string() } else { some(&workers) }
    }

    /// Gives the first batch up, for which the program has waited too long. None if no worker has begun anything, or there
    /// is no such batch.
    fn give_up(&mut self, timeout: Duration) -> Option<Error> {
        let (worker, Work { job: Job { index, .. }, .. }) = self.awaited().into_iter().next()?;
        let error = Error::LoaderTimedOut { rank: self.rank, worker, index, timeout, activity: self.activity() };
        // If all workers are stuck in earlier batches, nobody has begun this one.
        if self.batches.is_empty() && !self.begin() {
            return None;
        }
        self.batches.pop_front();
        self.first += 1;
        self.next = self.next.max((self.first, 0));
        Some(error)
    }
}

impl<S, T> Workers<S, T> {
    /// Whether [`next`](Iterator::next) would return a batch at once.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn is_ready(&self) -> bool {
        lock(&self.0.window).is_ready()
    }
}

impl<S, T> Shared<S, T> {
    /// Waits until the first batch is made, or there is none. Returns the error if that takes too long.
    fn wait(&self) -> Option<Error> {
        let mut window = lock(&self.window);
        let (since, timeout) = (Instant::now(), window.options.longest_wait());
        let mut patience = Patience::new(window.rank, &window.options);
        while !window.is_ready() && !window.is_over() {
            let waited = since.elapsed();
            patience.warn(waited, || {
                let end = timeout.map_or("never".to_string(), |timeout| format!("after {timeout:?}"));
                format!(
                    "a batch: {}. It ends {end}, with an error (LoaderOptions.timeout). If the data is only slow, give the loader more workers",
                    window.activity()
                )
            });
            if let Some(timeout) = timeout.filter(|timeout| waited >= *timeout)
                && let Some(error) = window.give_up(timeout)
            {
                self.moved.notify_all();
                return Some(error);
            }
            let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(waited));
            // A worker may be late to begin.
            let next = patience.left(waited).min(left).max(Duration::from_millis(1));
            window = wait_timeout(&self.made, window, next);
        }
        None
    }
}

impl<S: Send + 'static, T: Send + 'static> Iterator for Workers<S, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if !lock(&self.0.window).is_ready() {
            let shared = Arc::clone(&self.0);
            let text = move || format!("waits for a batch of its DataLoader: {}", lock(&shared.window).activity());
            if let Some(error) = during(text, || self.0.wait()) {
                return Some(Err(error));
            }
        }
        let mut window = lock(&self.0.window);
        let batch = window.batches.pop_front()?.batch;
        window.first += 1;
        self.0.moved.notify_all();
        batch
    }
}

impl<S, T> Drop for Workers<S, T> {
    fn drop(&mut self) {
        let mut window = lock(&self.0.window);
        window.closed = true;
        let batches = std::mem::take(&mut window.batches);
        self.0.moved.notify_all();
        // Samples that were read ahead are freed without the lock.
        drop(window);
        drop(batches);
    }
}

#[cfg(test)]
mod tests;
