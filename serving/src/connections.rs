//! Limits the cost of connections: anybody in the cluster may open one before we know who they are.
//!
//! A connection has some 40 KB of buffers. So at most [`MOST`] are open, at most [`OF_ONE`] of them from one address, and a
//! connection is closed when no byte has moved on it for [`IDLE`]. A handshake costs a millisecond of CPU time, so each address has
//! [`TURNS`] of them at a time: who does not finish its own makes only itself wait.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, Sleep};

/// The most open connections.
pub const MOST: usize = 512;
/// The most open connections from one address: an API server has one for each request that it forwards at the time.
pub const OF_ONE: usize = 128;
/// The most concurrent handshakes of one address.
pub const TURNS: usize = 8;
/// How long a connection stays open without a byte. Prometheus keeps one open from scrape to scrape.
pub const IDLE: Duration = Duration::from_mins(3);

/// The open connections.
#[derive(Clone, Debug, Default)]
pub struct Connections(Arc<Mutex<BTreeMap<IpAddr, OfOne>>>);

/// The open connections of one address.
#[derive(Debug)]
struct OfOne {
    count: usize,
    turns: Arc<Semaphore>,
}

impl Default for OfOne {
    fn default() -> Self {
        Self {
            count: 0,
            turns: Arc::new(Semaphore::new(TURNS)),
        }
    }
}

impl Connections {
    /// A permit for a connection from this address, as long as the result lives; `None` if there are too many.
    #[must_use]
    pub fn enter(&self, from: IpAddr) -> Option<Permit> {
        // An IPv4 address has two forms on a socket of both families.
        let from = from.to_canonical();
        let mut open = self.open();
        let all: usize = open.values().map(|one| one.count).sum();
        let of_one = open.get(&from).map_or(0, |one| one.count);
        if all >= MOST || of_one >= OF_ONE {
            return None;
        }
        let one = open.entry(from).or_default();
        one.count += 1;
        let turns = Arc::clone(&one.turns);
        drop(open);
        Some(Permit {
            connections: self.clone(),
            from,
            turns,
        })
    }

    fn open(&self) -> std::sync::MutexGuard<'_, BTreeMap<IpAddr, OfOne>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Permits one connection; frees its position among the open connections when it is dropped.
#[derive(Debug)]
pub struct Permit {
    connections: Connections,
    from: IpAddr,
    turns: Arc<Semaphore>,
}

impl Permit {
    /// Waits for one of its address's turns. The semaphore is never closed.
    pub async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.turns.acquire().await.ok()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.connections.open();
        if let Some(one) = open.get_mut(&self.from) {
            one.count -= 1;
            if one.count == 0 {
                open.remove(&self.from);
            }
        }
    }
}

/// A connection that has a permit, and ends when no byte moves on it.
#[derive(Debug)]
pub struct Bounded<T> {
    stream: T,
    idle: Pin<Box<Sleep>>,
    _permit: Permit,
}

impl<T> Bounded<T> {
    /// Bounds a connection.
    pub fn new(stream: T, permit: Permit) -> Self {
        Self {
            stream,
            idle: Box::pin(tokio::time::sleep(IDLE)),
            _permit: permit,
        }
    }

    /// The connection.
    pub const fn get_ref(&self) -> &T {
        &self.stream
    }

    /// Passes a result on, and notes that a byte has moved.
    fn moved<R>(&mut self, result: R) -> Poll<R> {
        self.idle.as_mut().reset(Instant::now() + IDLE);
        Poll::Ready(result)
    }

    /// Waits until a byte moves; an error if that takes too long.
    fn waits<R>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        ready!(self.idle.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Bounded<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            return self.moved(result);
        }
        self.waits(context)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Bounded<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_write(context, bytes) {
            return self.moved(result);
        }
        // A reader that does not read is idle, too.
        self.waits(context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_flush(context) {
            return Poll::Ready(result);
        }
        self.waits(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_shutdown(context) {
            return Poll::Ready(result);
        }
        self.waits(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn address(nth: usize) -> IpAddr {
        let nth = u8::try_from(nth).unwrap();
        IpAddr::from([10, 0, 0, nth])
    }

    #[test]
    fn nobody_takes_the_places_of_all_and_one_that_is_left_is_free() {
        let connections = Connections::default();
        let one: Vec<_> = (0..OF_ONE)
            .map(|_| connections.enter(address(1)).unwrap())
            .collect();
        assert!(connections.enter(address(1)).is_none());
        let mapped = "::ffff:10.0.0.1".parse().unwrap();
        assert!(connections.enter(mapped).is_none(), "it is the same one");
        let others: Vec<_> = (OF_ONE..MOST)
            .map(|nth| connections.enter(address(2 + nth % 100)).unwrap())
            .collect();
        assert!(
            connections.enter(address(200)).is_none(),
            "there are enough"
        );
        drop(one);
        assert!(connections.enter(address(200)).is_some());
        drop(others);
        assert!(connections.open().is_empty(), "nothing is kept of who left");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_when_nothing_moves_on_it_and_not_before() {
        let permit = Connections::default().enter(address(1)).unwrap();
        let (mut client, server) = tokio::io::duplex(16);
        let mut server = Bounded::new(server, permit);
        let mut buffer = [0; 4];
        for _ in 0..3 {
            let (sent, read) = tokio::join!(
                async {
                    tokio::time::sleep(IDLE.saturating_sub(Duration::from_secs(1))).await;
                    client.write_all(b"ping").await
                },
                server.read_exact(&mut buffer)
            );
            sent.unwrap();
            read.unwrap();
        }
        let error = server.read_exact(&mut buffer).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // It writes more than its reader takes.
        let error = server.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
