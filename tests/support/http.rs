//! The real server as a process, and requests to it.

use super::files::command;
use nix::{time::ClockId, unistd::Pid};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, ChildStderr, ExitStatus, Stdio},
    time::Duration,
};

/// A server that runs until it is dropped.
pub(crate) struct Server {
    child: Child,
    messages: BufReader<ChildStderr>,
    /// What it said before it listened.
    said: String,
    pub(crate) address: SocketAddr,
}

impl Server {
    /// Starts `serve` with these flags in `folder`, at a port that the system chooses. Its allocator uses one arena: with several,
    /// the memory that a server needs also depends on which thread asks for it first.
    pub(crate) fn start(folder: &Path, flags: &[&str]) -> Self {
        let words = [&["serve", "--device", "cpu", "--port", "0"], flags].concat();
        let mut server = command(folder, &words);
        server.env("MALLOC_ARENA_MAX", "1").stderr(Stdio::piped());
        let mut child = server.spawn().unwrap();
        let mut messages = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(messages.read_line(&mut line).unwrap() > 0, "the server ended: {said}");
            if let Some(address) = line.trim().strip_prefix("listening at http://") {
                break address.parse().unwrap();
            }
            said += &line;
        };
        Self { child, messages, said, address }
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: &str) {
        let kill = std::process::Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// How the server ended, and what it said.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        self.messages.read_to_string(&mut self.said).unwrap();
        (self.child.wait().unwrap(), std::mem::take(&mut self.said))
    }

    /// Processor time of the server since its start, of all of its threads, in seconds. What other programs make the server wait
    /// is no part of it.
    pub(crate) fn processor_seconds(&self) -> f64 {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap());
        let now = ClockId::pid_cpu_clock_id(pid).unwrap().now().unwrap();
        Duration::from(now).as_secs_f64()
    }

    /// Bytes of memory that the server has allocated and uses. Pages of the program's file do not count: how many of them stay in
    /// memory depends on the system.
    pub(crate) fn allocated(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    /// Sends a request and returns status and body.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> (u16, String) {
        reply(self.open(method, path, headers, body))
    }

    /// Sends a request, whose reply can be read piece by piece.
    pub(crate) fn open(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> BufReader<TcpStream> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        if !headers.iter().any(|header| header.starts_with("Host:")) {
            head += &format!("Host: {}\r\n", self.address);
        }
        headers.iter().for_each(|header| head += &format!("{header}\r\n"));
        let mut stream = self.write(&format!("{head}\r\n"));
        // A server that refuses the head need not read the body.
        let _ = stream.get_mut().write_all(body);
        stream
    }

    /// Writes text to a new connection, whatever it means.
    pub(crate) fn write(&self, text: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        BufReader::new(stream)
    }

    /// Posts JSON.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, String) {
        self.send("POST", path, &[JSON], body.to_string().as_bytes())
    }

    /// Posts JSON and returns the JSON of the reply, which must be good.
    pub(crate) fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, text) = self.post(path, body);
        assert_eq!(status, 200, "{body}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Posts JSON and returns the events of the reply.
    pub(crate) fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let (status, text) = self.post(path, body);
        assert_eq!(status, 200, "{body}: {text}");
        text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).map(str::to_owned).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) const JSON: &str = "Content-Type: application/json";

/// Status and body of a reply. Pieces of a chunked body are joined.
pub(crate) fn reply(mut stream: BufReader<TcpStream>) -> (u16, String) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).unwrap_or(0) == 0 {
            break;
        }
    }
    let status = head.split(' ').nth(1).map_or(0, |status| status.parse().unwrap());
    let mut body = Vec::new();
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        // The server may close the connection while the body is still sent.
        let _ = stream.read_to_end(&mut body);
        return (status, String::from_utf8(body).unwrap());
    }
    while let Some(piece) = chunk(&mut stream) {
        body.extend(piece);
    }
    (status, String::from_utf8(body).unwrap())
}

/// The next piece of a chunked body.
pub(crate) fn chunk(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    let size = usize::from_str_radix(line.trim(), 16).ok().filter(|size| *size > 0)?;
    let mut piece = vec![0; size + 2];
    stream.read_exact(&mut piece).ok()?;
    piece.truncate(size);
    Some(piece)
}
