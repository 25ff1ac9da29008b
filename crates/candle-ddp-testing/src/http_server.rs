//! An HTTP server of files with ranges and ETags, which may fail or be slow.
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// How a server answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mood {
    /// As it should.
    Well,
    /// The first so many requests for data fail.
    Failing(usize),
    /// It accepts connections and says nothing.
    Silent,
    /// It closes the connection in the middle of a body.
    Cut,
}

/// An HTTP server of files with ranges. It ends with the test's process.
#[derive(Debug)]
pub struct Server {
    /// Its address.
    pub address: SocketAddr,
    mood: Arc<Mutex<Mood>>,
    requests: Arc<AtomicUsize>,
}

impl Server {
    /// Serves these files, by their names.
    pub fn start(files: HashMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            mood: Arc::new(Mutex::new(Mood::Well)),
            requests: Arc::default(),
        };
        let (mood, requests, files) = (server.mood.clone(), server.requests.clone(), Arc::new(files));
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let (mood, requests, files) = (mood.clone(), requests.clone(), files.clone());
                std::thread::spawn(move || answer(connection.unwrap(), &files, &mood, &requests));
            }
        });
        server
    }

    /// Answers like this from now on, and counts requests anew.
    pub fn in_mood(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
        self.requests.store(0, Ordering::SeqCst);
    }

    /// The number of requests since [`in_mood`](Self::in_mood).
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

/// A tag that changes with the content.
fn etag(file: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    file.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

fn answer(mut connection: TcpStream, files: &HashMap<String, Vec<u8>>, mood: &Mutex<Mood>, requests: &AtomicUsize) {
    let lines = BufReader::new(connection.try_clone().unwrap()).lines().map_while(io::Result::ok);
    // All of them: a connection that is closed with unread bytes loses its answer.
    let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let Some((method, name)) = lines.first().and_then(|first| first.split_once(" /")) else { return };
    let name = name.split(' ').next().unwrap();
    let range = lines.iter().find_map(|line| {
        let (field, value) = line.split_once(": bytes=")?;
        let (begin, end) = value.split_once('-').filter(|_| field.eq_ignore_ascii_case("range"))?;
        Some(begin.parse::<usize>().unwrap()..end.parse::<usize>().unwrap() + 1)
    });
    let number = requests.fetch_add(1, Ordering::SeqCst);
    let mood = *mood.lock().unwrap();
    let head = |status: &str, len: usize, more: &str| {
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len}\r\n{more}\r\n")
    };
    let answer = match (files.get(name), range) {
        _ if mood == Mood::Silent => {
            // Until the client gives up.
            let _ = connection.read_to_end(&mut Vec::new());
            return;
        }
        _ if matches!(mood, Mood::Failing(count) if number < count) => head("503 Service Unavailable", 0, ""),
        (None, _) => head("404 Not Found", 0, ""),
        (Some(file), None) if method == "HEAD" => head("200 OK", file.len(), &format!("ETag: {}\r\n", etag(file))),
        (Some(file), Some(range)) if range.start < file.len() => {
            let body = &file[range.start..range.end.min(file.len())];
            let place =
                format!("Content-Range: bytes {}-{}/{}\r\n", range.start, range.start + body.len() - 1, file.len());
            let sent = if mood == Mood::Cut { body.len() / 2 } else { body.len() };
            let head = head("206 Partial Content", body.len(), &place);
            let _ = connection.write_all(&[head.as_bytes(), &body[..sent]].concat());
            return;
        }
        _ => head("416 Range Not Satisfiable", 0, ""),
    };
    let _ = connection.write_all(answer.as_bytes());
}
