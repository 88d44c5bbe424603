//! The suite that all ports pass.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferroce_nic::conformance::{Rig, run};
use ferroce_nic::wrap::{FaultConfig, Rates};
use ferroce_nic::{AnyPort, Options, Port, ShmConfig, ShmPort};

/// A folder of this test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ferroce-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for the link");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let left: Vec<_> = std::fs::read_dir(&self.0).map(|dir| dir.flatten().collect()).unwrap_or_default();
        let _ = std::fs::remove_dir_all(&self.0);
        if !std::thread::panicking() {
            assert!(left.is_empty(), "a closed link left {left:?}");
        }
    }
}

struct Shm {
    folder: Folder,
    config: ShmConfig,
    pairs: u32,
}

impl Shm {
    fn side(&self, last: u8, queues: u16) -> ShmConfig {
        let link = self.folder.0.join(format!("link{}", self.pairs));
        let addresses = vec![(format!("192.0.2.{last}").parse().expect("an address"), 24)];
        ShmConfig { link, addresses, queues, ..self.config.clone() }
    }
}

impl Rig for Shm {
    type Port = ShmPort;

    fn name(&self) -> String {
        format!("shm with mtu {} and rings of {} bytes", self.config.mtu, self.config.ring_bytes)
    }
    fn pair(&mut self, queues: u16) -> Result<(ShmPort, ShmPort), String> {
        self.pairs += 1;
        let mut a = ShmPort::open(&self.side(1, queues)).expect("the first side");
        let mut b = ShmPort::open(&self.side(2, queues)).expect("the second side");
        let deadline = Instant::now() + Duration::from_secs(10);
        while !(a.link_up() && b.link_up()) {
            assert!(Instant::now() < deadline, "not joined: {:?}, {:?}", a.problem(), b.problem());
            a.housekeep();
            b.housekeep();
        }
        Ok((a, b))
    }
    fn again(&mut self, queues: u16) -> Result<ShmPort, String> {
        Ok(ShmPort::open(&self.side(2, queues)).expect("the second side again"))
    }
    fn queues_are_joined(&self) -> bool {
        true
    }
    fn lossless(&self) -> bool {
        true
    }
}

#[test]
fn shm() {
    for (mtu, ring_bytes) in [(9000, 1 << 20), (1500, 64 << 10)] {
        let config = ShmConfig { mtu, ring_bytes, ..ShmConfig::new("") };
        let mut rig = Shm { folder: Folder::new(&format!("conformance-{mtu}")), config, pairs: 0 };
        let report = run(&mut rig);
        assert_eq!(report.skipped, [], "shm can do all of it");
        assert_eq!(report.passed.len(), 8);
    }
}

/// The same ports with both wrappers around them, rates so low that none of these frames is touched, but each frame to
/// send goes through the places for held ones.
struct Wrapped {
    base: Shm,
}

impl Wrapped {
    fn wrap(&self, port: ShmPort, side: &str) -> AnyPort {
        let rates = Rates { loss: 1e-15, ..Rates::default() };
        let fault = FaultConfig { seed: 1, rx: rates, tx: rates };
        let pcap = self.base.folder.0.join(format!("{side}.pcap"));
        AnyPort::wrap(port, &Options { fault: Some(fault), pcap: Some(pcap) }).expect("good options")
    }
}

impl Rig for Wrapped {
    type Port = AnyPort;

    fn name(&self) -> String {
        format!("pcap and fault around {}", self.base.name())
    }
    fn pair(&mut self, queues: u16) -> Result<(AnyPort, AnyPort), String> {
        let (a, b) = self.base.pair(queues)?;
        Ok((self.wrap(a, "a"), self.wrap(b, "b")))
    }
    fn again(&mut self, queues: u16) -> Result<AnyPort, String> {
        let port = self.base.again(queues)?;
        Ok(self.wrap(port, "b"))
    }
    fn queues_are_joined(&self) -> bool {
        true
    }
    fn lossless(&self) -> bool {
        true
    }
}

#[test]
fn wrapped_shm() {
    let config = ShmConfig { mtu: 1500, ..ShmConfig::new("") };
    let folder = Folder::new("conformance-wrapped");
    let mut rig = Wrapped { base: Shm { folder, config, pairs: 0 } };
    let report = run(&mut rig);
    assert_eq!((report.passed.len(), report.skipped), (8, vec![]));
    // The captures stay, as they should; all else is gone.
    for side in ["a", "b"] {
        std::fs::remove_file(rig.base.folder.0.join(format!("{side}.pcap"))).expect("a capture");
    }
}
