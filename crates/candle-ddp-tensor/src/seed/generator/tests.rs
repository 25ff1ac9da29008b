use super::*;

fn f32s(generator: &mut Generator, count: usize) -> Vec<f32> {
    generator.rand(0., 1., count, DType::F32, &Device::Cpu).unwrap().to_vec1().unwrap()
}

#[test]
fn the_numbers_are_those_of_the_algorithm() {
    // As `the_authors_known_answers`: key 0, counter 0.
    assert_eq!(Generator::new(0).draw(4).block(0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    let seed = 0x299f_31d0_a409_3822;
    let mut generator = Generator::new(0);
    generator.restore(seed, 0x0370_7344_1319_8a2e, 0x85a3_08d3_243f_6a88 - 3);
    assert_eq!(generator.draw(16).block(3), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
}

#[test]
fn draws_follow_each_other_and_can_be_computed_in_any_parts() {
    let mut generator = Generator::for_rank(7, 3);
    let whole = generator.clone().draw(40);
    let (first, second) = (generator.draw(13), generator.draw(24));
    assert_eq!((first, second.offset, generator.offset()), (whole, 4, 10));
    let mut numbers = [0; 40];
    whole.fill(0, &mut numbers);
    for start in 0..40 {
        for end in start..40 {
            let mut part = vec![0; end - start];
            whole.fill(start, &mut part);
            assert_eq!(part, numbers[start..end]);
        }
    }
    let mut part = [0; 24];
    second.fill(0, &mut part);
    assert_eq!(part, numbers[16..]);
}

/// Every thread computes a part of a large tensor.
#[test]
fn elements_do_not_depend_on_how_many_are_drawn_at_once() {
    let large = f32s(&mut Generator::new(5), 100_001);
    let mut generator = Generator::new(5);
    let parts: Vec<f32> = [2, 40_000, 59_998, 1].into_iter().flat_map(|count| f32s(&mut generator, count)).collect();
    assert_eq!(large, parts);
}

#[test]
fn seeds_and_ranks_draw_different_numbers() {
    let generators = [Generator::new(1), Generator::new(2), Generator::for_rank(1, 0), Generator::for_rank(1, 1)];
    let drawn: Vec<Vec<f32>> = generators.into_iter().map(|mut generator| f32s(&mut generator, 8)).collect();
    for (index, numbers) in drawn.iter().enumerate() {
        assert!(drawn[..index].iter().all(|others| others.iter().zip(numbers).all(|(a, b)| a != b)));
    }
}

#[test]
fn integers_are_refused() {
    let error = Generator::new(0).rand(0., 1., 3, DType::I64, &Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("i64"), "{error}");
    let bf16 = Generator::new(0).randn(0., 1., 3, DType::BF16, &Device::Cpu).unwrap();
    let f32 = Generator::new(0).randn(0., 1., 3, DType::F32, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    assert_eq!(bf16.to_vec1::<half::bf16>().unwrap(), f32.to_vec1::<half::bf16>().unwrap());
}

#[test]
fn each_sample_has_its_own_numbers() {
    let mut seen = std::collections::HashSet::new();
    for (seed, epoch, index, rank) in
        [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1)]
    {
        let mut generator = Generator::for_sample(seed, epoch, index, rank);
        let numbers = [generator.next_u64(), generator.next_u64()];
        assert!(seen.insert(numbers[0]) && seen.insert(numbers[1]));
        let mut again = Generator::for_sample(seed, epoch, index, rank);
        assert_eq!(numbers, [again.next_u64(), again.next_u64()]);
    }
}

#[test]
fn single_numbers_are_uniform() {
    let mut generator = Generator::new(7);
    let mut counts = [0; 5];
    for _ in 0..10_000 {
        counts[generator.below(5) as usize] += 1;
    }
    assert!(counts.iter().all(|count| (1850..2150).contains(count)), "{counts:?}");
    assert_eq!((generator.below(0), generator.below(1), generator.uniform(2., 2.)), (0, 0, 2.));
    let mean = (0..10_000).map(|_| generator.uniform(-1., 3.)).sum::<f64>() / 10_000.;
    assert!((mean - 1.).abs() < 0.05, "{mean}");
}
