//! The capture file, read back by a reader that others wrote.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ferroce_nic::conformance::commit;
use ferroce_nic::shm::pair;
use ferroce_nic::{AnyPort, Options, Port, PortQueue, ShmConfig};
use pcap_file::pcap::PcapReader;

struct File(PathBuf);

impl File {
    fn new(name: &str) -> File {
        File(std::env::temp_dir().join(format!("ferroce-{name}-{}.pcap", std::process::id())))
    }
    /// Times and frames; checks what is the same for all.
    fn read(&self) -> Vec<(Duration, Vec<u8>)> {
        let mut reader = PcapReader::new(std::fs::File::open(&self.0).expect("the file")).expect("a header");
        let header = reader.header();
        assert_eq!(header.ts_resolution, pcap_file::TsResolution::NanoSecond);
        assert_eq!(header.datalink, pcap_file::DataLink::ETHERNET);
        let mut packets = Vec::new();
        while let Some(packet) = reader.next_packet() {
            let packet = packet.expect("a whole record");
            assert_eq!(packet.orig_len as usize, packet.data.len());
            packets.push((packet.timestamp, packet.data.into_owned()));
        }
        packets
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn frame(len: usize, mark: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(3).wrapping_add(mark)).collect()
}

#[test]
fn all_frames_of_all_queues_are_there_in_order_of_time() {
    let file = File::new("order");
    let config = ShmConfig { queues: 2, ..ShmConfig::new("pair") };
    let (a, mut b) = pair(&config, &config).expect("a pair");
    let options = Options { pcap: Some(file.0.clone()), fault: None };
    let mut a = AnyPort::wrap(a, &options).expect("a writable folder");
    assert!(a.caps().mode.ends_with("captured"), "{}", a.caps().mode);
    let before = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    let mut want = Vec::new();
    for round in 0..50u8 {
        for queue in [1, 0] {
            let out = frame(60 + usize::from(round) * 150, round);
            assert!(commit(&mut aq[queue], &out));
            aq[queue].tx_flush();
            let mut got = 0;
            bq[queue].rx_burst(9, |frame| got += frame.len());
            assert_eq!(got, out.len());
            let back = frame(128 + usize::from(round), round ^ 0xff);
            assert!(commit(&mut bq[queue], &back));
            bq[queue].tx_flush();
            assert_eq!(aq[queue].rx_burst(9, |_| ()), 1);
            want.extend([out, back]);
        }
        if round % 7 == 0 {
            a.housekeep();
        }
    }
    assert!(aq[0].tx_reserve(100).is_some(), "reserved, and never committed");
    a.housekeep();
    let counters = a.counters();
    let counter = |name| counters.iter().find(|(known, _)| *known == name).expect("a counter").1;
    assert_eq!((counter("pcap_frames"), counter("pcap_missed")), (200, 0));
    drop(a);
    let packets = file.read();
    assert!(packets.windows(2).all(|pair| pair[0].0 <= pair[1].0), "out of order");
    assert!(packets[0].0 >= before, "a time before the test");
    assert_eq!(packets.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>(), want);
}

#[test]
fn frames_that_find_no_room_pass_and_are_counted() {
    let file = File::new("missed");
    let config = ShmConfig::new("pair");
    let (a, mut b) = pair(&config, &config).expect("a pair");
    let mut a = AnyPort::wrap(a, &Options { pcap: Some(file.0.clone()), fault: None }).expect("a folder");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    let bytes = frame(9000, 1);
    let mut passed = 0;
    for _ in 0..600 {
        assert!(commit(&mut aq[0], &bytes));
        aq[0].tx_flush();
        passed += bq[0].rx_burst(9, |frame| assert_eq!(frame.len(), 9000));
    }
    assert_eq!(passed, 600);
    let counters = a.counters();
    let counter = |name| counters.iter().find(|(known, _)| *known == name).expect("a counter").1;
    let (kept, missed) = (counter("pcap_frames"), counter("pcap_missed"));
    assert_eq!(kept + missed, 600);
    assert!(missed > 0 && kept > 400, "kept {kept}, missed {missed}");
    a.housekeep();
    assert_eq!(file.read().len() as u64, kept);
    drop(a);
}

#[test]
fn a_file_that_cannot_be_made_is_named() {
    let config = ShmConfig::new("pair");
    let (a, _b) = pair(&config, &config).expect("a pair");
    let options = Options { pcap: Some("/no/such/folder/x.pcap".into()), fault: None };
    let error = AnyPort::wrap(a, &options).err().expect("refused");
    assert_eq!((error.attribute.as_str(), error.asked.as_str()), ("pcap", "/no/such/folder/x.pcap"));
}
