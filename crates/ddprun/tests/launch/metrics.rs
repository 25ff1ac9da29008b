//! `--metrics-port`: with a real client of HTTP, and with clients that are slow, malformed or many.
use crate::{PATIENCE, Ran, Running, Sandbox, free_port, wait_until};
use candle_ddp_testing::skip;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

/// A run of two workers that wait until the file `end` is there, and serve metrics on the returned port.
fn serving(sandbox: &Sandbox) -> (Running, u16) {
    let port = free_port();
    let args = ["--nproc-per-node=2", "--run-id=a\"b", "--no-secret", "--metrics-port", &port.to_string()];
    let running = sandbox.start(&args, ": >here$RANK; while [ ! -e end ]; do sleep 0.02; done");
    wait_until("the workers", || sandbox.path("here0").exists() && sandbox.path("here1").exists());
    (running, port)
}

fn connect(port: u16) -> TcpStream {
    let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

/// The whole reply.
fn rest(mut client: TcpStream) -> String {
    let mut reply = String::new();
    client.read_to_string(&mut reply).unwrap();
    reply
}

pub(crate) fn ask(port: u16, request: &[u8]) -> String {
    let mut client = connect(port);
    client.write_all(request).unwrap();
    rest(client)
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9400\r\n\r\n";

fn end(sandbox: &Sandbox, running: Running) -> Ran {
    std::fs::write(sandbox.path("end"), "").unwrap();
    let ran = Ran::of(running);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran
}

#[test]
fn a_client_of_http_gets_the_page() {
    let python = "import sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as reply: print(reply.status, reply.headers['Content-Type'], reply.read().decode(), sep='\\n')";
    if Command::new("python3").arg("--version").output().is_err() {
        return skip("a_client_of_http_gets_the_page", "python3 is not installed");
    }
    let sandbox = Sandbox::new();
    let (running, port) = serving(&sandbox);
    let url = format!("http://127.0.0.1:{port}/metrics?x=1");
    let output = Command::new("python3").args(["-c", python, &url]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("200"), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(lines.next(), Some("text/plain; version=0.0.4; charset=utf-8"));
    let version = env!("CARGO_PKG_VERSION");
    let info = format!(r#"ddprun_info{{run_id="a\"b",version="{version}"}} 1"#);
    for expected in
        [&info, "ddprun_phase{phase=\"running\"} 1", "ddprun_nodes 1", "# TYPE ddprun_restarts_total counter"]
    {
        assert!(text.lines().any(|line| line == expected), "{expected} is not in {text}");
    }
    end(&sandbox, running).says(&format!("metrics are at http://127.0.0.1:{port}/metrics"));
}

#[test]
fn what_is_no_request_for_metrics_gets_an_error() {
    let sandbox = Sandbox::new();
    let (running, port) = serving(&sandbox);
    let long = [b"GET /metrics HTTP/1.1\r\nA: ".to_vec(), vec![b'a'; 9000]].concat();
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
    let cases: [(&[u8], &str); 8] = [
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found\r\n"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.1 405 Method Not Allowed\r\n"),
        (b"\x16\x03\x01\x02\x00\x01", "HTTP/1.1 400 Bad Request\r\n"),
        (b"GET /metrics\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
        (b"GET /metrics HTTP/9.7\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
        (&long, "HTTP/1.1 431 "),
        (many.as_bytes(), "HTTP/1.1 431 "),
    ];
    for (request, start) in cases {
        let reply = ask(port, request);
        assert!(reply.starts_with(start), "{}: {reply}", String::from_utf8_lossy(request));
        assert!(reply.contains("\r\nConnection: close\r\n"), "{reply}");
        let body = reply.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(body.is_empty(), request.starts_with(b"HEAD"), "{reply}");
        assert_eq!(reply.contains("\r\nAllow: GET, HEAD\r\n"), request.starts_with(b"POST"), "{reply}");
    }
    // Byte by byte, and with what follows.
    let mut client = connect(port);
    GET.iter().for_each(|byte| client.write_all(&[*byte]).unwrap());
    assert!(rest(client).starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(ask(port, &[GET, GET].concat()).starts_with("HTTP/1.1 200 OK\r\n"));
    end(&sandbox, running);
}

#[test]
fn clients_that_say_nothing_and_crowds_end_nothing() {
    let sandbox = Sandbox::new();
    let (running, port) = serving(&sandbox);
    let silent: Vec<TcpStream> = (0..16).map(|_| connect(port)).collect();
    // They have all places, until somebody asks: the oldest gives way.
    assert!(ask(port, GET).starts_with("HTTP/1.1 200 OK\r\n"));
    let replies: Vec<String> = silent.into_iter().map(rest).collect();
    assert!(replies[0].starts_with("HTTP/1.1 503 "), "{replies:?}");
    assert!(replies[1..].iter().all(|reply| reply.starts_with("HTTP/1.1 408 Request Timeout\r\n")), "{replies:?}");
    // Many that leave at once, and many that ask at once: each of them gets an answer, or is told that there are too many.
    (0..300).for_each(|_| drop(connect(port)));
    let crowd: Vec<_> = (0..100)
        .map(|_| {
            std::thread::spawn(move || {
                let mut client = connect(port);
                let mut reply = String::new();
                // One that is turned away while it writes sees its connection closed.
                let _ = client.write_all(GET).and_then(|()| client.read_to_string(&mut reply));
                reply
            })
        })
        .collect();
    let replies: Vec<String> = crowd.into_iter().map(|client| client.join().unwrap()).collect();
    let is_answer =
        |reply: &String| reply.is_empty() || reply.starts_with("HTTP/1.1 200 ") || reply.starts_with("HTTP/1.1 503 ");
    assert!(replies.iter().all(is_answer), "{replies:?}");
    wait_until("an answer after the crowd", || ask(port, GET).starts_with("HTTP/1.1 200 OK\r\n"));
    end(&sandbox, running);
}

/// A page in a browser may have a name that leads to this machine.
#[test]
fn a_request_for_another_host_gets_nothing_from_the_loopback_device() {
    let sandbox = Sandbox::new();
    let (running, port) = serving(&sandbox);
    let with = |host: &str| ask(port, format!("GET /metrics HTTP/1.1\r\nA: b\r\n{host}\r\n").as_bytes());
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9400", "[::1]", "[::1]:9400", "10.0.0.1:80"] {
        assert!(with(&format!("Host: {host}\r\n")).starts_with("HTTP/1.1 200 OK\r\n"), "{host}");
    }
    for host in ["evil.example", "evil.example:9400", "localhost.evil.example", "127.0.0.1.evil.example", ""] {
        let reply = with(&format!("Host: {host}\r\n"));
        assert!(reply.starts_with("HTTP/1.1 403 Forbidden\r\n") && !reply.contains("ddprun_info"), "{host}: {reply}");
    }
    assert!(with("Host: localhost\r\nhOST: evil.example\r\n").starts_with("HTTP/1.1 403 "));
    end(&sandbox, running);
}

/// A client that sends its request too slowly is not served for ever.
#[test]
fn a_slow_client_is_sent_away() {
    let sandbox = Sandbox::new();
    let (running, port) = serving(&sandbox);
    let mut client = connect(port);
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut reply = [0; 100];
    let read = loop {
        // It may have been sent away meanwhile.
        let _ = client.write_all(b"G");
        match client.read(&mut reply) {
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock) => {}
            read => break read.unwrap(),
        }
    };
    assert!(reply[..read].starts_with(b"HTTP/1.1 408 Request Timeout\r\n"), "{reply:?}");
    end(&sandbox, running);
}

#[test]
fn a_port_that_is_taken_ends_the_run_before_it_begins() {
    let sandbox = Sandbox::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = sandbox.run(&["--metrics-port", &port], ": >here");
    ran.ends(1, &["for --metrics-port"]);
    assert!(!sandbox.path("here").exists());
}

#[test]
fn a_free_port_is_said() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&["--metrics-port=0", "--metrics-addr=::1"], "true");
    ran.ends(0, &["metrics are at http://[::1]:"]);
}
