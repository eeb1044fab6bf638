# Short names for the usual tasks; the work is done by CMake (see CMakePresets.json) and the scripts in tools/.

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup build run test bench fuzz format format-check lint clean

help:
	@echo 'moewave: one Mixture-of-Experts layer, one GPU kernel launch per direction.'
	@echo
	@echo '  make run           set up, build, then run the example layer on 4 emulated ranks, check it against the'
	@echo '                     FP64 reference and draw its pictures into out/'
	@echo '  make build         set up and build the program: build/release/moewave'
	@echo '  make test          set up, build and run all tests, those that gain from it also under ThreadSanitizer,'
	@echo '                     AddressSanitizer and UndefinedBehaviorSanitizer; install and use the package'
	@echo '  make bench         set up, build and run the micro-benchmarks'
	@echo '  make fuzz          fuzz the file parsers with libFuzzer (needs clang++) for FUZZ_SECONDS each (60)'
	@echo '  make format        format all sources; make format-check only says what is not'
	@echo '  make lint          clang-tidy over all sources'
	@echo '  make clean         delete build/ and out/'
	@echo
	@echo 'Set-up installs missing Debian or Ubuntu packages, saying which (as root or through sudo; otherwise it prints'
	@echo 'the command). A CUDA toolkit is used when there is one; no GPU is needed. JOBS=n limits parallel compilation.'
	@echo 'One build folder each: cmake --preset release|debug|asan|tsan|fuzz; cmake --build --preset NAME; ctest --preset NAME.'

setup:
	@tools/setup.sh run

build: setup
	@cmake --preset release
	@cmake --build --preset release --target moewave-cli -j $(JOBS)

run: build
	@tools/run_example.sh

test:
	@tools/setup.sh test
	@tools/test.sh $(JOBS)

bench:
	@tools/setup.sh test
	@cmake --preset release -DMOEWAVE_BUILD_BENCH=ON
	@cmake --build --preset release --target moewave_bench_protocol -j $(JOBS)
	@build/release/bench/moewave_bench_protocol

fuzz:
	@tools/setup.sh test
	@tools/fuzz.sh $(FUZZ_SECONDS)

format:
	@tools/setup.sh format
	@tools/format.sh

format-check:
	@tools/setup.sh format
	@tools/format.sh --check

lint:
	@tools/setup.sh lint
	@tools/lint.sh $(JOBS)

clean:
	@rm -rf build out
