//! `--metrics-port`: answers `GET /metrics` over HTTP.
//!
//! The standard library's listener is enough: a scraper asks for one small page every few seconds, on a connection that closes. The
//! crates that serve HTTP either bring a runtime or set no time limits. Requests are parsed by `httparse`. Clients may be slow, send
//! nothing, or come in crowds: each has [`PATIENCE`], and [`MOST`] are served at a time. When there are more, the oldest of those that
//! have not asked yet gives way.
use super::status::{Source, prometheus};
use crate::error::{Error, Result};
use candle_ddp_base::thread;
use rustix::net::{SendFlags, send};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a client has for its request, and then for the reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many clients are served at a time.
const MOST: usize = 16;
/// The longest request, with its headers.
const LONGEST: usize = 8 << 10;
/// How long to wait when the system accepts no connections, for lack of descriptors for example.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens, and serves in a thread until this process ends. Returns the page's address.
///
/// # Errors
/// Returns an error if the system refuses the address.
pub(crate) fn start(address: SocketAddr, source: Arc<Source>) -> Result<SocketAddr> {
    let refused = |error| Error::io(format!("listening on {} for --metrics-port", address), error);
    let listener = TcpListener::bind(address).map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    thread::spawn("ddprun-metrics", move || serve(&listener, &source))?;
    Ok(bound)
}

/// A client that is served.
struct Client {
    stream: TcpStream,
    /// Whether its request is complete.
    has_asked: AtomicBool,
}

fn serve(listener: &TcpListener, source: &Arc<Source>) {
    // The oldest first. The threads hold those that are served.
    let mut served: Vec<Weak<Client>> = Vec::new();
    let is_local = listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
    loop {
        let Ok((client, _)) = listener.accept() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        served.retain(|client| client.strong_count() > 0);
        if served.len() >= MOST {
            let has_not_asked = |client: &Weak<Client>| {
                client.upgrade().is_some_and(|client| !client.has_asked.load(Ordering::Relaxed))
            };
            let Some(oldest) = served.iter().position(has_not_asked) else {
                turn_away(&client);
                continue;
            };
            // Its thread then sees the end of the connection.
            served.remove(oldest).upgrade().iter().for_each(|client| turn_away(&client.stream));
        }
        let client = Arc::new(Client { stream: client, has_asked: AtomicBool::new(false) });
        served.push(Arc::downgrade(&client));
        let source = Arc::clone(source);
        let answer = move || {
            if let Err(error) = answer(&client, is_local, &source) {
                log::debug!("a client of the metrics has left: {error}");
            }
        };
        if let Err(error) = thread::spawn("ddprun-metrics-client", answer) {
            log::debug!("a client of the metrics gets no answer: {error}");
        }
    }
}

/// Tells a client that there are too many, and closes its connection, without waiting for it.
fn turn_away(client: &TcpStream) {
    let reply = Reply::error("503 Service Unavailable", "too many clients at a time");
    // It has left if this fails.
    let _ = send(client, &reply.bytes(true), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let _ = client.shutdown(Shutdown::Both);
}

/// A reply to a request.
struct Reply {
    status: &'static str,
    /// More header lines.
    headers: &'static str,
    text: String,
}

impl Reply {
    fn error(status: &'static str, reason: impl std::fmt::Display) -> Self {
        Self { status, headers: "", text: format!("{reason}\n") }
    }

    fn bytes(&self, has_body: bool) -> Vec<u8> {
        let Self { status, headers, text } = self;
        let kind = if *status == OK { "text/plain; version=0.0.4; charset=utf-8" } else { "text/plain; charset=utf-8" };
        let length = text.len();
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
        );
        [head.as_bytes(), if has_body { text.as_bytes() } else { &[] }].concat()
    }
}

const OK: &str = "200 OK";

/// Reads a client's request, and replies.
fn answer(client: &Client, is_local: bool, source: &Source) -> io::Result<()> {
    let request = request(&client.stream, is_local)?;
    client.has_asked.store(true, Ordering::Relaxed);
    let mut client = &client.stream;
    let (reply, has_body) = match request {
        None => return Ok(()),
        Some(Err(reply)) => (reply, true),
        Some(Ok(Request { path, is_head })) if path == "/metrics" => {
            let reply = match source.snapshot() {
                Ok(snapshot) => Reply { status: OK, headers: "", text: prometheus::text(&snapshot) },
                Err(error) => Reply::error("503 Service Unavailable", error),
            };
            (reply, !is_head)
        }
        Some(Ok(request)) => (Reply::error("404 Not Found", "the metrics are at /metrics"), !request.is_head),
    };
    let until = Instant::now() + PATIENCE;
    let bytes = reply.bytes(has_body);
    let mut left = &bytes[..];
    while !left.is_empty() {
        client.set_write_timeout(Some(left_until(until)?))?;
        match client.write(left) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => left = &left[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    // What the client still sends would reset the connection, perhaps before it has read the reply.
    client.shutdown(Shutdown::Write)?;
    let mut rest = [0; 1 << 10];
    loop {
        client.set_read_timeout(Some(left_until(until)?))?;
        match client.read(&mut rest) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The time until `until`, or an error if none is left.
fn left_until(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

struct Request {
    path: String,
    is_head: bool,
}

/// Reads a request: the reply if it is none that this server serves; `None` if the client leaves without one.
fn request(mut client: &TcpStream, is_local: bool) -> io::Result<Option<Result<Request, Reply>>> {
    let until = Instant::now() + PATIENCE;
    let (mut bytes, mut piece) = (Vec::new(), [0; 1 << 10]);
    loop {
        let read = left_until(until).and_then(|left| {
            client.set_read_timeout(Some(left))?;
            client.read(&mut piece)
        });
        match read {
            Ok(0) => return Ok(None),
            Ok(read) => bytes.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let reason = format!("the request must be complete within {} s", PATIENCE.as_secs());
                return Ok(Some(Err(Reply::error("408 Request Timeout", reason))));
            }
            Err(error) => return Err(error),
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Request::new(&mut headers);
        let outcome = match parsed.parse(&bytes) {
            Ok(httparse::Status::Complete(_)) => accept(&parsed, is_local),
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST => continue,
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                let reason = format!("the request must have less than {LONGEST} bytes and at most 64 headers");
                Err(Reply::error("431 Request Header Fields Too Large", reason))
            }
            Err(error) => Err(Reply::error("400 Bad Request", format_args!("this is no HTTP request: {error}"))),
        };
        return Ok(Some(outcome));
    }
}

/// Whether a request to the loopback device may be for this host: an IP address or localhost, perhaps with a port.
fn is_own_name(host: &[u8]) -> bool {
    let host = String::from_utf8_lossy(host);
    let host = host.trim();
    let is_address = host.parse::<SocketAddr>().is_ok() || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    is_address || host.split(':').next().is_some_and(|name| name.eq_ignore_ascii_case("localhost"))
}

fn accept(parsed: &httparse::Request, is_local: bool) -> Result<Request, Reply> {
    let hosts = parsed.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    if is_local && !hosts.map(|header| header.value).all(is_own_name) {
        // A page in a browser of this machine may have a name that leads here, to read what only this machine may.
        return Err(Reply::error("403 Forbidden", "the Host of the request must be an IP address or localhost"));
    }
    let is_head = match parsed.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => {
            let reply = Reply::error("405 Method Not Allowed", "the method must be GET or HEAD");
            return Err(Reply { headers: "Allow: GET, HEAD\r\n", ..reply });
        }
    };
    // A query changes nothing.
    let target = parsed.path.unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default().to_string();
    Ok(Request { path, is_head })
}
