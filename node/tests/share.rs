//! How accurately a GPU's time is shared: the shim's part and the node's, with a simulated GPU in
//! virtual time.
mod world;

use proptest::collection::vec;
use proptest::prelude::{Strategy, any};
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use tranche_node::compute::{PERIOD_NANOS, Suspicion};
use tranche_shim_core::ComputePolicy::{Strict, WorkConserving};
use tranche_shim_core::compute::{Bucket, WAIT_NANOS, WHOLE};
use world::{MICRO, MILLI, Nvml, Program, SECOND, World, jain};

fn near(found: f64, wanted: f64, what: &str) {
    println!("{what}: {found:.2} % of {wanted} %");
    assert!(
        (found - wanted).abs() <= 5.0,
        "{what}: {found:.2} % instead of {wanted} %"
    );
}

#[test]
fn every_share_has_its_part_whatever_its_kernels_take() {
    for cores in [5, 10, 25, 50, 75] {
        for (kernel, seconds) in [
            (10 * MICRO, 3),
            (100 * MICRO, 5),
            (MILLI, 10),
            (10 * MILLI, 10),
            (100 * MILLI, 20),
        ] {
            for depth in [1, 64] {
                let mut world = World::new(&[(cores, Strict)]);
                world.start(Program {
                    depth,
                    ..Program::new(0, &[kernel])
                });
                let whole = world.run(seconds * SECOND)[0];
                near(
                    whole,
                    f64::from(cores),
                    &format!("{cores} %, kernels of {kernel} ns, {depth} deep, from the start"),
                );
            }
        }
    }
}

/// Short and long kernels, shapes that never come again, several processes: after its first two seconds, a share has no less
/// than its cores in any two, and after its first six no more.
#[test]
fn a_share_has_its_cores_in_any_two_seconds() {
    let mut random = TestRunner::deterministic();
    let micros = || (1.0..3.7_f64).prop_map(|digits| 10_f64.powf(digits));
    let program = || (vec(micros(), 1..40), any::<bool>(), select(vec![1, 64]));
    let share = (5..=75_u8, vec(program(), 1..=4));
    for _ in 0..24 {
        let (cores, programs) = share.new_tree(&mut random).unwrap().current();
        let mut world = World::new(&[(cores, Strict)]);
        for (micros, new_grids, depth) in &programs {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "some microseconds"
            )]
            let kernels: Vec<_> = micros.iter().map(|it| (it * 1000.0) as u64).collect();
            world.start(Program {
                new_grids: *new_grids,
                depth: *depth,
                ..Program::new(0, &kernels)
            });
        }
        world.run(2 * SECOND);
        for window in 1..7 {
            let what = format!("window {window} of {cores} %, {programs:.0?}");
            let (found, wanted) = (world.run(2 * SECOND)[0], f64::from(cores));
            // Several processes take their first measurements while all of them run. The node makes up for what they pay
            // too much, until they have measured again.
            assert!(found >= wanted - 5.0, "{what}: {found:.2} %");
            if window > 2 {
                near(found, wanted, &what);
            }
        }
    }
}

/// With kernels of seconds, no launch of a share waits longer than the bound, also not the first ones,
/// which are not measured yet and of which several are queued; over time the share gets its cores.
#[test]
fn kernels_of_seconds_wait_no_longer_than_the_bound() {
    for depth in [1, 64] {
        let mut world = World::new(&[(20, Strict)]);
        world.start(Program {
            depth,
            ..Program::new(0, &[2 * SECOND])
        });
        let part = world.run(1000 * SECOND)[0];
        near(part, 20.0, &format!("20 %, kernels of 2 s, {depth} deep"));
        let longest = world.programs[0].longest_wait;
        println!("the longest wait: {} ms", longest / MILLI);
        // It waits in sleeps of 20 ms.
        assert!(longest <= WAIT_NANOS + 20 * MILLI, "{longest}");
    }
}

/// One kernel of half a minute among short ones: they wait no longer than the bound, continue at a
/// lower rate, and repay its time.
#[test]
fn a_kernel_of_half_a_minute_is_made_up_for_at_a_lower_rate() {
    let mut world = World::new(&[(20, Strict)]);
    world.start(Program {
        until: SECOND,
        depth: 1,
        ..Program::new(0, &[30 * SECOND])
    });
    world.start(Program {
        from: 31 * SECOND,
        ..Program::new(0, &[5 * MILLI])
    });
    world.run(60 * SECOND);
    let lower = world.run(30 * SECOND)[0];
    assert!((8.0..=12.0).contains(&lower), "{lower} % while it repays");
    world.run(600 * SECOND);
    near(world.run(30 * SECOND)[0], 20.0, "when all is repaid");
    let longest = world.programs[1].longest_wait;
    println!("the longest wait: {} ms", longest / MILLI);
    assert!(longest <= WAIT_NANOS, "{longest}");
}

#[test]
fn kernels_of_all_lengths_together() {
    let mut world = World::new(&[(25, Strict)]);
    for _ in 0..8 {
        world.start(Program::new(
            0,
            &[10 * MICRO, 3 * MILLI, 200 * MICRO, 40 * MILLI],
        ));
    }
    near(
        world.run(10 * SECOND)[0],
        25.0,
        "eight processes of one share",
    );
}

#[test]
fn thirty_and_seventy_under_contention() {
    for policy in [Strict, WorkConserving] {
        for (short, long) in [
            (100 * MICRO, 100 * MICRO),
            (20 * MICRO, 20 * MILLI),
            (20 * MILLI, 20 * MICRO),
            (100 * MILLI, 100 * MILLI),
        ] {
            let mut world = World::new(&[(30, policy), (70, policy)]);
            world.start(Program::new(0, &[short]));
            world.start(Program::new(1, &[long]));
            world.run(10 * SECOND);
            let parts = world.run(10 * SECOND);
            for (found, wanted) in parts.iter().zip([30.0, 70.0]) {
                near(
                    *found,
                    wanted,
                    &format!("{policy:?}, kernels of {short} and {long} ns"),
                );
            }
        }
    }
}

/// If NVML's processes cannot be assigned to shares, the shares get a common correction.
#[test]
fn thirty_and_seventy_where_only_the_whole_gpu_is_known() {
    for (short, long) in [(100 * MICRO, 100 * MICRO), (20 * MICRO, 2 * MILLI)] {
        let mut world = World::new(&[(30, Strict), (70, Strict)]);
        world.nvml = Nvml::WholeGpu;
        world.start(Program::new(0, &[short]));
        world.start(Program::new(1, &[long]));
        world.run(10 * SECOND);
        let parts = world.run(10 * SECOND);
        for (found, wanted) in parts.iter().zip([30.0, 70.0]) {
            near(*found, wanted, &format!("kernels of {short} and {long} ns"));
        }
    }
}

/// When NVML stops answering, the scales stay as they are.
#[test]
fn a_ratio_that_is_old_is_not_used() {
    let mut world = World::new(&[(25, Strict)]);
    world.nvml = Nvml::WholeGpu;
    world.start(Program {
        measures: 200,
        ..Program::new(0, &[500 * MICRO])
    });
    world.run(4 * SECOND);
    world.nvml = Nvml::Silent;
    let part = world.run(20 * SECOND)[0];
    assert!((10.0..=35.0).contains(&part), "{part} % of 25 %");
}

/// If only the whole GPU's utilization is known, the work of a process without a share does not
/// slow the shares down.
#[test]
fn work_that_no_share_accounts_for_holds_no_share_up() {
    let mut world = World::new(&[(25, Strict), (25, Strict)]);
    world.nvml = Nvml::WholeGpu;
    world.foreign = 50;
    for share in [0, 1] {
        world.start(Program::new(share, &[300 * MICRO]));
    }
    world.run(10 * SECOND);
    for part in world.run(10 * SECOND) {
        near(part, 25.0, "beside work of 50 % that is nobody's");
    }
}

#[test]
fn four_equal_shares_are_equal() {
    for kernels in [
        [100 * MICRO; 4],
        [10 * MICRO, 100 * MICRO, MILLI, 10 * MILLI],
        [50 * MILLI; 4],
    ] {
        let mut world = World::new(&[(25, Strict); 4]);
        for (share, kernel) in kernels.into_iter().enumerate() {
            world.start(Program::new(share, &[kernel]));
        }
        world.run(10 * SECOND);
        let parts = world.run(10 * SECOND);
        println!("{parts:.1?}: {:.4}", jain(&parts));
        assert!(jain(&parts) >= 0.99, "{parts:?}");
        for part in parts {
            near(part, 25.0, "of four");
        }
    }
}

/// Programs that start at other moments, with kernels below and above a time slice: some of the first prices of long kernels
/// are from before the others ran, and some have the others' work in them. The GPU switches at once or takes its time, and the
/// host runs the programs at once or late.
#[test]
fn four_equal_shares_are_equal_from_any_start() {
    const SETTLES: u64 = 16 * SECOND;
    let machines = [(0, 0), (0, 30 * MILLI), (50 * MICRO, 0), (100 * MICRO, 0)];
    for (start, machine) in (0..8).zip(machines.into_iter().cycle()) {
        let mut world = World::new(&[(25, Strict); 4]);
        (world.switch, world.longest_stall) = machine;
        for (share, kernel) in [100 * MICRO, 500 * MICRO, 3 * MILLI, 20 * MILLI]
            .into_iter()
            .enumerate()
        {
            let nth = share as u64 + 3;
            world.start(Program {
                from: (start * 7919 * nth) % 50 * MILLI + start * 131 * MICRO,
                depth: 1024,
                ..Program::new(share, &[kernel])
            });
        }
        let parts = world.run(SETTLES);
        assert!(jain(&parts) >= 0.99, "{start}: {parts:?}");
        for _ in 0..6 {
            let parts = world.run(10 * SECOND);
            println!("{start}: {parts:.1?}: {:.4}", jain(&parts));
            assert!(jain(&parts) >= 0.998, "{start}: {parts:?}");
        }
    }
}

/// Shares that together claim the whole GPU launch more than it can run, because it stands still between two
/// processes. What waits in the queues is no reason to lower a price, however long it waits: a share with
/// too low a price would get more than its cores as soon as the GPU has time again.
#[test]
fn on_a_full_gpu_prices_stay_right() {
    for (policy, switch) in [(Strict, 50), (Strict, 120), (WorkConserving, 120)] {
        let mut world = World::new(&[(25, policy); 4]);
        world.switch = switch * MICRO;
        for (share, kernel) in [100 * MICRO, 500 * MICRO, 3 * MILLI, 20 * MILLI]
            .into_iter()
            .enumerate()
        {
            world.start(Program {
                depth: 1000,
                ..Program::new(share, &[kernel])
            });
        }
        world.run(30 * SECOND);
        let parts = world.run(30 * SECOND);
        println!("{policy:?}: {parts:.1?}: {:.4}", jain(&parts));
        assert!(jain(&parts) >= 0.99, "{policy:?}: {parts:?}");
        for (program, share) in world.programs.iter().zip(&world.shares) {
            let price = program.price(0).unwrap() * share.refill.scale / WHOLE;
            let kernel = program.kernels[0];
            println!("{policy:?}: {price} for {kernel}");
            assert!(
                price * 5 >= kernel * 4 && price * 4 <= kernel * 5,
                "{policy:?}: a price of {price} ns for {kernel} ns"
            );
        }
    }
}

/// From the moment they come, their time slices are in every measurement of a kernel that is longer than a slice.
#[test]
fn neighbours_that_come_later_change_no_price() {
    let mut world = World::new(&[(25, Strict); 4]);
    world.start(Program::new(0, &[20 * MILLI]));
    world.run(6 * SECOND);
    for share in 1..4 {
        world.start(Program::new(share, &[3 * MILLI]));
    }
    for window in 0..15 {
        let found = world.run(2 * SECOND)[0];
        near(found, 25.0, &format!("window {window} beside three others"));
    }
    let price = world.programs[0].price(0).unwrap();
    assert!(price <= 21 * MILLI, "{price}");
}

/// A shape whose launches take longer from some moment on.
#[test]
fn a_kernel_that_takes_longer_than_before_has_a_higher_price() {
    let mut world = World::new(&[(25, Strict)]);
    world.start(Program::new(0, &[500 * MICRO]));
    world.run(6 * SECOND);
    world.programs[0].kernels = vec![2 * MILLI];
    world.run(4 * SECOND);
    for window in 0..5 {
        let found = world.run(2 * SECOND)[0];
        near(found, 25.0, &format!("window {window} with longer kernels"));
    }
    let price = world.programs[0].price(0).unwrap();
    assert!(price >= 19 * MILLI / 10, "{price}");
}

/// A launch reads the share's grant if its batch is empty or its price is not trusted, which costs some hundred nanoseconds.
#[test]
fn few_launches_read_the_grant() {
    for (kernel, most) in [(4 * MICRO, 6), (20 * MICRO, 30), (100 * MICRO, 150)] {
        let mut world = World::new(&[(50, Strict)]);
        world.start(Program::new(0, &[kernel; 300]));
        world.run(6 * SECOND);
        let counts = |world: &World| (world.programs[0].looks, world.programs[0].launched as u64);
        let before = counts(&world);
        world.run(2 * SECOND);
        let (looks, launched) = counts(&world);
        let part = (looks - before.0) * 1000 / (launched - before.1);
        println!("300 kernels of {kernel} ns: {part} of 1,000 launches");
        assert!(part <= most, "{part} of 1,000 launches of {kernel} ns");
    }
}

/// Without a node, nobody says that prices are right.
#[test]
fn without_a_node_prices_follow_the_measurements_again() {
    let mut world = World::new(&[(25, Strict)]);
    world.start(Program::new(0, &[500 * MICRO]));
    world.run(6 * SECOND);
    world.node_lives = false;
    world.programs[0].kernels = vec![2 * MILLI];
    world.run(6 * SECOND);
    near(world.run(2 * SECOND)[0], 25.0, "without a node");
}

#[test]
fn wrong_prices_are_set_right_by_what_the_gpu_does() {
    for measures in [30, 50, 200, 400] {
        let mut world = World::new(&[(25, Strict)]);
        world.start(Program {
            measures,
            ..Program::new(0, &[500 * MICRO])
        });
        world.run(15 * SECOND);
        near(
            world.run(10 * SECOND)[0],
            25.0,
            &format!("measurements of {measures} %"),
        );
    }
}

#[test]
fn what_nobody_uses_goes_to_who_conserves_work() {
    let mut world = World::new(&[(25, WorkConserving), (50, WorkConserving), (25, Strict)]);
    world.start(Program::new(0, &[300 * MICRO]));
    world.run(SECOND);
    let alone = world.run(3 * SECOND)[0];
    assert!(alone > 99.0, "alone: {alone}");
    // The second share starts and gets its part at once; then the strict one.
    world.start(Program::new(1, &[300 * MICRO]));
    world.run(2 * SECOND);
    let parts = world.run(5 * SECOND);
    near(parts[0], 33.3, "a third");
    near(parts[1], 66.7, "two thirds");
    world.start(Program::new(2, &[300 * MICRO]));
    world.run(SECOND);
    let parts = world.run(5 * SECOND);
    for (part, cores) in parts.iter().zip([25.0, 50.0, 25.0]) {
        near(*part, cores, "all three");
    }
}

#[test]
fn a_neighbour_that_uses_little_leaves_the_rest() {
    let mut world = World::new(&[(50, WorkConserving), (50, WorkConserving)]);
    world.start(Program::new(0, &[300 * MICRO]));
    // 2 ms in every 20.
    world.start(Program {
        works: (2 * MILLI, 20 * MILLI),
        depth: 1,
        ..Program::new(1, &[500 * MICRO])
    });
    world.run(2 * SECOND);
    let parts = world.run(10 * SECOND);
    println!("{parts:.1?}");
    assert!(parts[0] > 80.0 && parts[1] > 4.0, "{parts:?}");
}

#[test]
fn bursts_stay_below_the_share() {
    let mut world = World::new(&[(25, Strict)]);
    world.start(Program {
        works: (500 * MILLI, SECOND),
        ..Program::new(0, &[200 * MICRO])
    });
    let part = world.run(20 * SECOND)[0];
    // Half of the time, and a burst of unused time.
    assert!((10.0..=17.5).contains(&part), "{part}");
}

#[test]
fn without_a_node_everybody_has_the_cores() {
    for policy in [Strict, WorkConserving] {
        let mut world = World::new(&[(30, policy), (70, policy)]);
        world.node_lives = false;
        world.start(Program::new(0, &[300 * MICRO]));
        near(world.run(10 * SECOND)[0], 30.0, "a node that never lived");
    }
    let mut world = World::new(&[(30, WorkConserving)]);
    world.start(Program::new(0, &[300 * MICRO]));
    world.run(2 * SECOND);
    world.node_lives = false;
    world.run(4 * SECOND);
    near(world.run(10 * SECOND)[0], 30.0, "a node that died");
}

#[test]
fn a_tenant_that_writes_too_little_is_noticed() {
    let mut world = World::new(&[(10, Strict), (50, Strict)]);
    world.start(Program::new(0, &[MILLI]));
    world.start(Program::new(1, &[MILLI]));
    world.run(3 * SECOND);
    let suspect = |world: &World, share: usize| world.shares[share].last.unwrap().suspect;
    assert_eq!((suspect(&world, 0), suspect(&world, 1)), (None, None));
    let (_, spent) = world.shares[1].account.compute();
    // First back to 0; then too little for a long time.
    world.shares[1].lie = Some(0);
    world.run(100 * MILLI);
    assert_eq!(suspect(&world, 1), Some(Suspicion::WentBack));
    for step in 0..300 {
        world.shares[1].lie = Some(spent + step * 100 * MICRO);
        let share = &world.shares[1];
        Bucket::new(&share.refill, share.cores, world.now).correct(&share.account, i64::MIN);
        world.run(100 * MILLI);
    }
    assert_eq!(
        (suspect(&world, 0), suspect(&world, 1)),
        (None, Some(Suspicion::TooLittle))
    );
}

/// Programs of a share that follow each other, each with other kernels, whose measured prices are wrong in
/// other ways: none is charged for what the one before it did.
#[test]
fn a_program_after_another_gets_the_share() {
    for samples_every in [PERIOD_NANOS, SECOND / 6] {
        let mut world = World::new(&[(25, Strict)]);
        world.samples_every = samples_every;
        let kinds = [(MILLI, 100), (10 * MICRO, 140), (50 * MILLI, 100)];
        for (kernel, measures) in kinds.into_iter().cycle().take(9) {
            // Between two programs nothing is launched for a quarter of a second.
            world.run(250 * MILLI);
            world.start(Program {
                measures,
                until: 10 * SECOND,
                ..Program::new(0, &[kernel])
            });
            near(
                world.run(10 * SECOND)[0],
                25.0,
                &format!("kernels of {kernel} ns after others, sampled every {samples_every} ns"),
            );
        }
    }
}

/// The driver's samples may be a second apart, and a little more.
#[test]
fn rare_samples_correct_prices_too() {
    for (kernels, measures) in [
        (vec![500 * MICRO], 50),
        (vec![500 * MICRO], 200),
        (vec![100 * MILLI], 100),
        (vec![10 * MICRO, 3 * MILLI, 40 * MILLI], 100),
    ] {
        let mut world = World::new(&[(25, Strict), (50, Strict)]);
        world.samples_every = SECOND + 3 * MILLI;
        world.start(Program {
            measures,
            ..Program::new(0, &kernels)
        });
        world.start(Program::new(1, &[300 * MICRO]));
        world.run(15 * SECOND);
        let parts = world.run(10 * SECOND);
        for (found, wanted) in parts.iter().zip([25.0, 50.0]) {
            near(
                *found,
                wanted,
                &format!("{kernels:?} measured as {measures} %"),
            );
        }
    }
}

/// A driver that names one process in each sample, with the whole GPU's utilization: noise, but right on
/// average.
#[test]
fn samples_that_name_one_process_are_averaged() {
    for (cores, measures) in [
        (vec![30, 70], 100),
        (vec![25, 25], 100),
        (vec![25; 4], 100),
        (vec![30, 60], 160),
    ] {
        let shares: Vec<_> = cores.iter().map(|cores| (*cores, Strict)).collect();
        let mut world = World::new(&shares);
        world.nvml = Nvml::OneProcess;
        for share in 0..cores.len() {
            world.start(Program {
                measures,
                ..Program::new(share, &[300 * MICRO])
            });
        }
        world.run(60 * SECOND);
        let parts = world.run(60 * SECOND);
        for (found, wanted) in parts.iter().zip(&cores) {
            near(
                *found,
                f64::from(*wanted),
                &format!("{cores:?} measured as {measures} %"),
            );
        }
    }
}

/// Programs that end before it can be found out whose they were.
#[test]
fn short_programs_get_the_share() {
    for millis in [60, 300, 1000] {
        let mut world = World::new(&[(25, Strict), (25, Strict)]);
        world.start(Program::new(1, &[300 * MICRO]));
        let mut all = 0.0;
        let count = 20_000 / millis;
        for _ in 0..count {
            world.start(Program {
                until: millis * MILLI,
                ..Program::new(0, &[300 * MICRO])
            });
            all += world.run(millis * MILLI)[0];
        }
        #[expect(clippy::cast_precision_loss, reason = "some hundred")]
        let mean = all / count as f64;
        near(mean, 25.0, &format!("programs of {millis} ms"));
    }
}

/// NVML does not answer for some seconds.
#[test]
fn a_driver_that_does_not_answer_for_a_while_changes_nothing() {
    let mut world = World::new(&[(25, Strict)]);
    world.start(Program::new(0, &[300 * MICRO]));
    world.run(5 * SECOND);
    let usual = world.samples_every;
    world.samples_every = 3 * SECOND;
    near(world.run(3 * SECOND)[0], 25.0, "without answers");
    world.samples_every = usual;
    near(world.run(5 * SECOND)[0], 25.0, "after it");
    let scale = world.shares[0].refill.scale;
    assert!(scale == 0 || scale.abs_diff(WHOLE) < WHOLE / 20, "{scale}");
}

/// Kernels of seconds are charged in one step and run in many.
#[test]
fn neighbours_of_long_kernels_get_their_shares() {
    for seconds in [1, 3, 6] {
        let mut world = World::new(&[(25, Strict); 4]);
        world.start(Program::new(0, &[seconds * SECOND]));
        for share in 1..4 {
            world.start(Program::new(share, &[300 * MICRO]));
        }
        world.run(60 * SECOND);
        for (share, part) in world.run(120 * SECOND).iter().enumerate().skip(1) {
            near(
                *part,
                25.0,
                &format!("share {share} beside kernels of {seconds} s"),
            );
        }
    }
}

/// Who writes more than it spent lowers its own prices, and is named; it raises no other share's.
#[test]
fn a_tenant_that_writes_too_much_is_noticed_and_harms_no_other() {
    let mut world = World::new(&[(25, Strict); 4]);
    for share in 0..4 {
        world.start(Program::new(share, &[300 * MICRO]));
    }
    world.run(5 * SECOND);
    let (_, mut spent) = world.shares[0].account.compute();
    for _ in 0..900 {
        spent += 10 * SECOND;
        world.shares[0].lie = Some(spent);
        world.run(100 * MILLI);
    }
    for share in 1..4 {
        let last = world.shares[share].last.unwrap();
        assert_eq!(last.suspect, None, "share {share}");
        assert!(last.refill.scale < WHOLE * 5 / 4, "share {share}: {last:?}");
    }
    let suspect = world.shares[0].last.unwrap().suspect;
    assert_eq!(suspect, Some(Suspicion::TooMuch));
}

/// Who writes nothing has no ratio, and is noticed all the same.
#[test]
fn a_tenant_that_writes_nothing_is_noticed() {
    let mut world = World::new(&[(25, Strict), (50, Strict)]);
    for share in 0..2 {
        world.start(Program::new(share, &[300 * MICRO]));
    }
    world.run(SECOND);
    let (_, spent) = world.shares[0].account.compute();
    world.shares[0].lie = Some(spent);
    world.run(90 * SECOND);
    let suspect = |share: usize| world.shares[share].last.unwrap().suspect;
    assert_eq!((suspect(0), suspect(1)), (Some(Suspicion::TooLittle), None));
}

/// Corrections below zero are no time that others may use.
#[test]
fn corrections_give_nobody_more_than_the_gpu() {
    let mut world = World::new(&[(50, Strict), (50, WorkConserving)]);
    world.start(Program::new(0, &[300 * MICRO]));
    world.start(Program::new(1, &[300 * MICRO]));
    world.run(3 * SECOND);
    let (_, mut spent) = world.shares[0].account.compute();
    for step in 0..200 {
        // 0.9 s less in four of five steps, and a little more in the fifth.
        spent = if step % 5 == 0 {
            spent + 4 * SECOND
        } else {
            spent.saturating_sub(900 * MILLI)
        };
        world.shares[0].lie = Some(spent);
        world.run(100 * MILLI);
        let share = &world.shares[1];
        let rate = share.refill.rate(share.cores, world.now);
        assert!(rate <= WHOLE, "{rate}");
    }
}
