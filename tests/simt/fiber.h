// How one fiber gives way to another, and what the sanitizers must hear of it. Included by simt_rt.cpp alone.
#pragma once

#include <cstddef>

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
extern "C" void carryover_simt_switch(void** save, void* to);
asm(".text\n.globl carryover_simt_switch\n.hidden carryover_simt_switch\n"
    ".type carryover_simt_switch,@function\ncarryover_simt_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size carryover_simt_switch,.-carryover_simt_switch\n");
#else
#ifndef SIMT_UCONTEXT
#define SIMT_UCONTEXT
#endif
#include <ucontext.h>
#endif

namespace simt {
namespace {

struct Machine {  // where a fiber continues
#ifdef SIMT_UCONTEXT
  ucontext_t uc;
#else
  void* sp = nullptr;
#endif
};

#ifdef SIMT_TSAN
void acquire(void* p) {
  __tsan_acquire(p);
}
void release(void* p) {
  __tsan_release(p);
}
#else
void acquire(void*) {}
void release(void*) {}
#endif

void transfer(Machine& from, Machine& to) {
#ifdef SIMT_UCONTEXT
  swapcontext(&from.uc, &to.uc);
#else
  carryover_simt_switch(&from.sp, to.sp);
#endif
}

}  // namespace
}  // namespace simt
