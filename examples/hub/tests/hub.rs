//! A hub on this machine, ranks as threads, and real processes under `ddprun`.
use candle_core::{Device, Tensor};
use candle_ddp::checkpoint::{Pretrained, save_tensors};
use candle_ddp::{Error, ProcessGroup, Result, spawn};
use hf_hub::Cache;
use hub_model::Hub;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

const MODEL: &str = "some/model";
const COMMIT: &str = "c0ffee0123456789c0ffee0123456789c0ffee01";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// The files of a model with two shards of a tensor each.
fn model(folder: &Path) -> HashMap<String, Vec<u8>> {
    let mut weights = Vec::new();
    for (name, file) in ["a", "b"].into_iter().zip(SHARDS) {
        let tensor = Tensor::arange(0_f32, 1000., &Device::Cpu).unwrap();
        save_tensors(&[(name.to_string(), tensor)].into(), folder.join(file)).unwrap();
        weights.push(format!("{name:?}:{file:?}"));
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", weights.join(","));
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    std::fs::read_dir(folder).unwrap().map(read).collect()
}

/// A hub. It ends with the test's process.
struct Server {
    endpoint: String,
    /// The names of the files that were downloaded.
    downloads: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(files: HashMap<String, Vec<u8>>, lost: Option<&'static str>) -> Self {
        Self::of_commit(files, lost, COMMIT)
    }

    fn of_commit(files: HashMap<String, Vec<u8>>, lost: Option<&'static str>, commit: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let downloads = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&downloads);
        std::thread::spawn(move || {
            listener.incoming().for_each(|connection| answer(connection.unwrap(), (&files, commit), lost, &told));
        });
        Self { endpoint, downloads }
    }

    /// The names of the files that were downloaded, sorted.
    fn downloads(&self) -> Vec<String> {
        let mut names = self.downloads.lock().unwrap().clone();
        names.sort();
        names
    }
}

fn answer(
    mut to: TcpStream,
    (files, commit): (&HashMap<String, Vec<u8>>, &str),
    lost: Option<&str>,
    told: &Mutex<Vec<String>>,
) {
    let lines: Vec<String> = BufReader::new(to.try_clone().unwrap())
        .lines()
        .map_while(|line| line.ok().filter(|line| !line.is_empty()))
        .collect();
    let Some(path) = lines.first().and_then(|line| line.split(' ').nth(1)) else { return };
    let range = lines.iter().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(String::from));
    let (status, headers, body) = match path.strip_prefix(&format!("/{MODEL}/resolve/{COMMIT}/")) {
        None if path == format!("/api/models/{MODEL}/revision/main") => {
            let names: Vec<String> = files.keys().map(|name| format!("{{\"rfilename\":{name:?}}}")).collect();
            let info = format!("{{\"sha\":{commit:?},\"siblings\":[{}]}}", names.join(","));
            ("200 OK", String::new(), info.into_bytes())
        }
        Some(name) if lost != Some(name) && files.contains_key(name) => {
            let file = &files[name];
            let (from, to) = range.as_deref().and_then(|range| range.split_once('-')).unwrap_or(("0", ""));
            let from: usize = from.parse().unwrap();
            let to = to.parse().map_or(file.len(), |to: usize| to + 1);
            if to == file.len() {
                told.lock().unwrap().push(name.to_string());
            }
            let place = format!("Content-Range: bytes {from}-{}/{}\r\n", to - 1, file.len());
            let headers = format!("{place}ETag: \"{name}\"\r\nX-Repo-Commit: {COMMIT}\r\n");
            ("206 Partial Content", headers, file[from..to].to_vec())
        }
        _ => ("404 Not Found", String::new(), Vec::new()),
    };
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
    let _ = to.write_all(&[head.into_bytes(), body].concat());
}

fn hub(server: &Server, cache: &Path) -> Hub {
    Hub { endpoint: server.endpoint.clone(), cache: Cache::new(cache.to_path_buf()), is_shared: false }
}

/// Downloads on three ranks of a host, and returns the result of each.
fn download(hub: &Hub) -> Vec<Result<f32>> {
    let sum = |pg: &ProcessGroup| -> Result<f32> {
        let pretrained = Pretrained::open(hub.folder(pg, MODEL, "main")?)?;
        let sums = pretrained.names().map(|name| Ok(pretrained.read(name)?.sum_all()?.to_scalar::<f32>()?));
        Ok(sums.collect::<Result<Vec<f32>>>()?.iter().sum())
    };
    spawn(3, |pg| Ok(sum(&pg))).unwrap()
}

#[test]
fn one_rank_downloads_and_all_read() {
    let [files, cache] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let server = Server::start(model(files.path()), None);
    let hub = hub(&server, cache.path());
    for _ in 0..2 {
        let sums: Vec<f32> = download(&hub).into_iter().map(Result::unwrap).collect();
        assert_eq!(sums, [999_000.; 3]);
        // The second time, all of it is there.
        let expected = ["config.json", SHARDS[0], SHARDS[1], "model.safetensors.index.json"];
        assert_eq!(server.downloads(), expected);
    }
}

#[test]
fn all_ranks_fail_if_one_cannot_download() {
    let files = tempfile::tempdir().unwrap();
    let files = model(files.path());
    let elsewhere = |file: &str| {
        let index = format!("{{\"weight_map\":{{\"a\":{file:?}}}}}");
        files.clone().into_iter().chain([("model.safetensors.index.json".to_string(), index.into_bytes())]).collect()
    };
    let cases = [
        (Server::start(files.clone(), Some(SHARDS[1])), SHARDS[1]),
        (Server::start(elsewhere("../evil"), None), "\"../evil\" must be in the folder of the index"),
        (Server::of_commit(files, None, "../../evil"), "its commit must be 40 hexadecimal digits, not \"../../evil\""),
        (Server::start(HashMap::new(), None), "it has neither model.safetensors.index.json nor model.safetensors"),
        (Server { endpoint: "http://127.0.0.1:1".to_string(), downloads: Arc::default() }, "127.0.0.1:1"),
    ];
    for (server, expected) in cases {
        let cache = tempfile::tempdir().unwrap();
        let errors: Vec<Error> = download(&hub(&server, cache.path())).into_iter().map(Result::unwrap_err).collect();
        assert!(matches!(errors[0], Error::Io { .. }) && errors[0].to_string().contains(expected), "{errors:?}");
        for error in &errors[1..] {
            assert!(matches!(error, Error::RankFailed { rank: 0, .. }), "{error:?}");
            assert!(
                error.to_string().contains(expected) && error.to_string().contains("downloading some/model"),
                "{error}"
            );
        }
    }
}

#[test]
fn processes_of_a_run_share_a_download_or_read_a_folder() {
    let [files, home] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let server = Server::start(model(files.path()), None);
    let ddprun = Path::new(env!("CARGO_BIN_EXE_hub_model")).with_file_name("ddprun");
    if !ddprun.exists() {
        eprintln!("skipped: {} was not built", ddprun.display());
        return;
    }
    let run = |args: &[&str]| {
        let mut command = Command::new(&ddprun);
        command.args(["--nproc-per-node=3", env!("CARGO_BIN_EXE_hub_model")]).args(args);
        command.env("HF_HOME", home.path()).env("HF_ENDPOINT", &server.endpoint);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = run(&[MODEL]);
    for rank in 0..3 {
        let line = format!("rank {rank} read 2 tensors with 2000 parameters, at most 1000 at a time, from ");
        assert!(text.lines().any(|text| text.starts_with(&line) && text.ends_with(COMMIT)), "{text}");
    }
    assert_eq!(server.downloads().len(), 4);
    assert!(run(&["--folder", files.path().to_str().unwrap()]).contains("rank 2 read 2 tensors"));
}
